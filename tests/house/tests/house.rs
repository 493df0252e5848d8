//! The rules of [`foretell_house`], applied to this workspace.
#![allow(clippy::unwrap_used, clippy::panic)] // A file that cannot be read fails the test.

use std::path::{Path, PathBuf};

use foretell_house::codes::{Codes, page, read_codes};
use foretell_house::cycles::cycles;
use foretell_house::invariants::{INVARIANTS, breaches};
use foretell_house::modules::{CrateModules, Target};
use foretell_house::page::{declared_twice, faults};
use foretell_house::text::{
    broken_links, dangling_citations, hints_in_messages, long_test_names, misplaced_names, wide_comments,
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every file and folder of the workspace, without build output and hidden ones, sorted.
fn tree() -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut open = vec![root()];
    while let Some(folder) = open.pop() {
        for entry in std::fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if name == "target" || name.starts_with('.') {
                continue;
            }
            if path.is_dir() {
                open.push(path.clone());
            }
            found.push(path);
        }
    }
    found.sort();
    found
}

/// Every file of the workspace with one of `endings`, sorted.
fn files(endings: &[&str]) -> Vec<PathBuf> {
    let has_ending = |path: &PathBuf| endings.iter().any(|ending| path.to_string_lossy().ends_with(ending));
    tree().into_iter().filter(|path| path.is_file() && has_ending(path)).collect()
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn no_two_sibling_modules_import_each_other() {
    let mut report = Vec::new();
    for file in files(&["src/lib.rs", "lib.rs", "main.rs"]).iter().filter(|file| file.parent().unwrap().ends_with("src")) {
        let modules = CrateModules::read(file, Target::Any).unwrap();
        for cycle in cycles(&modules.edges()) {
            let name = file.strip_prefix(root()).unwrap().display().to_string();
            report.push(format!("{name}, in `{}`: {}", cycle.parent.join("::"), cycle.siblings.join(", ")));
            report.extend(cycle.imports.iter().map(|import| format!("    {import}")));
        }
    }
    assert!(report.is_empty(), "modules import each other:\n{}", report.join("\n"));
}

#[test]
fn the_page_without_a_server_has_all_that_its_modules_use() {
    let modules = CrateModules::read(&root().join("src/web.rs"), Target::Page).unwrap();
    let manifests = ["Cargo.toml", "web/Cargo.toml"].map(|name| read(&root().join(name)));
    let faults: Vec<String> = faults(&modules, &manifests[0], &manifests[1]).into_iter().collect();
    assert!(faults.is_empty(), "{} faults, which `web/build` would find too:\n{}", faults.len(), faults.join("\n"));
}

#[test]
fn no_comment_is_wider_than_100_columns() {
    let mut report = Vec::new();
    for file in files(&[".rs", ".cu", ".cuh", ".cpp", ".h", ".py", ".sh"]) {
        let lines = wide_comments(&read(&file));
        report.extend(lines.iter().map(|line| format!("{}:{line}", file.display())));
    }
    assert!(report.is_empty(), "{} wide comments:\n{}", report.len(), report.join("\n"));
}

#[test]
fn test_names_have_at_most_70_characters() {
    let long: Vec<_> = files(&[".rs"]).iter().flat_map(|file| long_test_names(&read(file))).collect();
    assert!(long.is_empty(), "{} long names:\n{}", long.len(), long.join("\n"));
}

#[test]
fn architecture_and_contributing_cite_what_exists() {
    let sources: String = files(&[".rs", ".py", ".cu", ".sh", ".yaml"]).iter().map(|file| read(file)).collect();
    let relative = |path: &PathBuf| path.strip_prefix(root()).unwrap().display().to_string();
    let tree: Vec<String> = tree().iter().map(relative).collect();
    let mut report = Vec::new();
    for name in ["ARCHITECTURE.md", "CONTRIBUTING.md"] {
        let document = read(&root().join(name));
        let dangling = dangling_citations(&document, &tree, &sources);
        let misplaced = misplaced_names(&document, |file| std::fs::read_to_string(root().join(file)).ok());
        report.extend(dangling.into_iter().chain(misplaced).map(|cited| format!("{name}, {cited}")));
    }
    assert!(report.is_empty(), "{}", report.join("\n"));
}

#[test]
fn no_part_knows_what_architecture_says_it_must_not() {
    let mut report = Vec::new();
    for invariant in INVARIANTS {
        let mut files_of_invariant = 0;
        for file in files(&[".rs"]) {
            let path = file.strip_prefix(root()).unwrap().display().to_string();
            let is_in = invariant.folders.iter().any(|folder| path.starts_with(&format!("{folder}/")));
            let is_test = path.contains("/tests/") || path.ends_with("/tests.rs");
            if is_in && !is_test && !invariant.except.iter().any(|end| path.ends_with(end)) {
                files_of_invariant += 1;
                let found = breaches(invariant, &read(&file));
                report.extend(found.iter().map(|(line, word)| format!("{path}:{line}: `{word}`, but {}", invariant.says)));
            }
        }
        assert!(files_of_invariant > 0, "no file is of {:?}", invariant.folders);
    }
    assert!(report.is_empty(), "{}", report.join("\n"));
}

#[test]
fn every_relative_link_in_a_document_leads_to_a_file() {
    let mut report = Vec::new();
    for file in files(&[".md"]) {
        let broken = broken_links(&read(&file), file.parent().unwrap());
        report.extend(broken.iter().map(|link| format!("{}, {link}", file.display())));
    }
    assert!(report.is_empty(), "{}", report.join("\n"));
}

/// Set this variable to write the page of errors anew.
const WRITE_ERRORS: &str = "FORETELL_WRITE_ERRORS";

#[test]
fn the_page_of_errors_lists_every_code() {
    let mut codes = Codes::new();
    let is_source =
        |path: &&PathBuf| path.components().any(|part| part.as_os_str() == "src") && !path.starts_with(root().join("tests"));
    for file in files(&[".rs"]).iter().filter(is_source) {
        read_codes(&read(file), &mut codes).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
    }
    let (path, page) = (root().join("docs/reference/errors.md"), page(&codes));
    if std::env::var_os(WRITE_ERRORS).is_some() {
        std::fs::write(&path, &page).unwrap();
    }
    assert!(read(&path) == page, "docs/reference/errors.md is stale; `{WRITE_ERRORS}=1 cargo test -p foretell-house` writes it");
    let undocumented: Vec<_> = codes.iter().filter(|(_, meaning)| meaning.is_empty()).collect();
    assert!(undocumented.is_empty(), "codes without a meaning: {undocumented:?}");
}

#[test]
fn no_message_has_its_hint_inside() {
    let is_source = |path: &&PathBuf| {
        let has = |part: &str| path.components().any(|component| component.as_os_str() == part);
        // The one place that joins the two.
        let joins = path.ends_with("units/src/diagnostic.rs") || has("house");
        has("src") && !has("tests") && !path.ends_with("tests.rs") && !joins
    };
    let mut report = Vec::new();
    for file in files(&[".rs"]).iter().filter(is_source) {
        report.extend(hints_in_messages(&read(file)).iter().map(|line| format!("{}:{line}", file.display())));
    }
    assert!(report.is_empty(), "the hint is the help of a diagnostic:\n{}", report.join("\n"));
}

#[test]
fn the_scripts_of_a_page_declare_each_name_once() {
    // Those of `foretell serve`, and those of the page without a server.
    let (served, built) = (read(&root().join("src/serve/planner.rs")), read(&root().join("web/build")));
    let of_server =
        served.split("include_str!(\"").skip(1).filter_map(|rest| rest.split('"').next()).map(|name| format!("src/serve/{name}"));
    let joined = built.lines().find(|line| line.contains("cat $page/draw.js")).expect("the line that joins the scripts");
    let of_folder = joined.split_whitespace().skip(1).map(|name| name.replace("$page", "src/serve/page"));
    for scripts in [of_server.collect::<Vec<_>>(), of_folder.collect()] {
        let scripts: Vec<String> =
            scripts.iter().filter(|name| name.ends_with(".js")).map(|name| read(&root().join(name))).collect();
        assert!(scripts.len() >= 9);
        assert_eq!(declared_twice(&scripts), [].into());
    }
}
