//! What the planner's page without a server needs of the program's source. It compiles modules of
//! the program for WebAssembly (`src/web.rs`, `web/Cargo.toml`), which takes too long for CI. These
//! rules find in the source what most often breaks that build.

use crate::modules::CrateModules;
use std::collections::BTreeSet;

/// Parts of the standard library that compile for WebAssembly and then fail, or are not there.
const OF_A_SYSTEM: [&str; 5] = ["fs", "net", "process", "thread", "time"];

/// What the modules of the page use and may not, a sentence each. `program` and `page` are the
/// manifests of the program and of the page.
#[must_use]
pub fn faults(modules: &CrateModules, program: &str, page: &str) -> BTreeSet<String> {
    let joined = |path: &[String]| path.join("::");
    let missing = modules.missing();
    let lost =
        missing.iter().map(|(user, path)| format!("`{}` uses `crate::{}`, which the page lacks", joined(user), joined(path)));
    let lacking: BTreeSet<String> = dependencies(program).difference(&dependencies(page)).cloned().collect();
    let foreign = modules.foreign().filter_map(|(user, path)| match path.as_slice() {
        [first, second, ..] if first == "std" && OF_A_SYSTEM.contains(&second.as_str()) && !is_measure(path) => {
            Some(format!("`{}` uses `{}`, which a page lacks: see `crate::host`", joined(user), joined(path)))
        }
        [first, ..] if lacking.contains(first) => {
            Some(format!("`{}` uses `{}`, which `web/Cargo.toml` lacks", joined(user), joined(path)))
        }
        _ => None,
    });
    lost.chain(foreign).collect()
}

/// A duration is a number, not a clock.
fn is_measure(path: &[String]) -> bool {
    path.iter().any(|name| name == "Duration")
}

/// The names of the crates in a manifest's tables of dependencies, as source has them. Those of
/// tests and of features are left out.
fn dependencies(manifest: &str) -> BTreeSet<String> {
    let mut is_table = false;
    let mut names = BTreeSet::new();
    for line in manifest.lines() {
        if line.starts_with('[') {
            is_table = line.ends_with("dependencies]") && !line.contains("dev-") && !line.contains("workspace");
        } else if is_table && !line.contains("optional = true") {
            let name = line.split(['.', ' ', '=']).next().filter(|name| !name.is_empty());
            names.extend(name.map(|name| name.replace('-', "_")));
        }
    }
    names
}

/// Names that several scripts declare. Scripts of a page are joined into one, in which a name can
/// be declared once.
#[must_use]
pub fn declared_twice(scripts: &[String]) -> BTreeSet<String> {
    const WORDS: [&str; 5] = ["const ", "let ", "function ", "async function ", "class "];
    let declared = |line: &str| {
        let rest = WORDS.iter().find_map(|word| line.strip_prefix(word))?;
        let name: String = rest.chars().take_while(|letter| letter.is_alphanumeric() || matches!(letter, '_' | '$')).collect();
        Some(name).filter(|name| !name.is_empty())
    };
    let mut known = BTreeSet::new();
    let names = scripts.iter().flat_map(|script| script.lines()).filter_map(declared);
    names.filter(|name| !known.insert(name.clone())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::modules::Target;

    #[test]
    fn a_name_that_two_scripts_declare_is_found() {
        let scripts = ["let waiting = 0;\nconst ask = () => {\n  const own = 1;\n};\n", "const waiting = [];\nconst own = 2;\n"];
        assert_eq!(declared_twice(&scripts.map(str::to_owned)), ["waiting".to_owned()].into());
    }

    #[test]
    fn what_a_page_lacks_is_found() {
        let folder = std::env::temp_dir().join(format!("foretell-house-{}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a folder");
        let write = |name: &str, text: &str| std::fs::write(folder.join(name), text).expect("it is written");
        write("web.rs", "mod one;\nmod host;");
        write("host.rs", "#[cfg(not(target_family = \"wasm\"))]\nuse std::fs::File;\npub fn now() {}");
        let one = "use crate::{host, other::Thing};\nuse std::time::{Duration, Instant};\nuse libc::c_int;\n\
                   fn go() { host::now(); #[cfg(not(target_family = \"wasm\"))] let a = std::fs::read(\"x\"); std::fs::write(\"x\", \"\"); }";
        write("one.rs", one);
        let modules = CrateModules::read(&folder.join("web.rs"), Target::Page).expect("modules");
        let program = "[dependencies]\nlibc.workspace = true\nserde = \"1\"\n[dev-dependencies]\nboon = \"1\"";
        let found: Vec<String> = faults(&modules, program, "[dependencies]\nserde = \"1\"").into_iter().collect();
        std::fs::remove_dir_all(&folder).expect("it is removed");
        let expected = [
            "`one` uses `crate::other::Thing`, which the page lacks",
            "`one` uses `libc::c_int`, which `web/Cargo.toml` lacks",
            "`one` uses `std::fs::write`, which a page lacks: see `crate::host`",
            "`one` uses `std::time::Instant`, which a page lacks: see `crate::host`",
        ];
        assert_eq!(found, expected);
    }
}
