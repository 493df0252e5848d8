//! The modules of one crate and the paths that each of them uses, read from source with `syn`.
//!
//! Tests (`#[cfg(test)]`) are left out: they may import anything. So is what a [`Target`] lacks.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::Visit;

/// A module's path inside its crate: empty for the root.
pub type ModulePath = Vec<String>;

/// What a crate is compiled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// Any: code for all targets is read.
    Any,
    /// A page: code with `#[cfg(not(target_family = "wasm"))]` is left out.
    Page,
}

/// One module: what it declares, and every path that its code uses.
#[derive(Debug, Default)]
pub struct Module {
    /// Names of items that the module defines (child modules are modules of their own).
    items: BTreeSet<String>,
    /// Names that `use` brings in, with the absolute path of each.
    imports: BTreeMap<String, ModulePath>,
    /// Modules whose names are all brought in by `use path::*`.
    globs: Vec<ModulePath>,
    /// Absolute paths, inside the crate, that the code mentions.
    mentions: BTreeSet<ModulePath>,
    /// Paths that the code mentions and that lead out of the crate, or start with a local name.
    foreign: BTreeSet<ModulePath>,
}

/// All modules of one crate.
#[derive(Debug)]
pub struct CrateModules {
    modules: BTreeMap<ModulePath, Module>,
    target: Target,
}

impl CrateModules {
    /// Reads the crate whose root file is `root` (`src/lib.rs` or `src/main.rs`).
    ///
    /// # Errors
    ///
    /// A file that cannot be read or parsed, as a sentence that names it.
    pub fn read(root: &Path, target: Target) -> Result<Self, String> {
        let mut modules = Self { modules: BTreeMap::new(), target };
        let folder = root.parent().unwrap_or(Path::new(".")).to_path_buf();
        modules.read_file(root, &folder, &[])?;
        Ok(modules)
    }

    /// Edges between modules: `(user, used)` for every path that leads from one module to an item
    /// of another. Edges between a module and its own ancestors or descendants are left out.
    #[must_use]
    pub fn edges(&self) -> BTreeSet<(ModulePath, ModulePath)> {
        let mut edges = BTreeSet::new();
        for (user, module) in &self.modules {
            let imported = module.imports.values().chain(&module.globs);
            for path in module.mentions.iter().chain(imported) {
                if let Some(used) = self.owner_of(path, 0)
                    && !used.starts_with(user)
                    && !user.starts_with(&used)
                {
                    edges.insert((user.clone(), used));
                }
            }
        }
        edges
    }

    /// Paths inside the crate that lead to nothing: each module that uses one, and the path.
    #[must_use]
    pub fn missing(&self) -> BTreeSet<(ModulePath, ModulePath)> {
        let root = self.modules.get([].as_slice());
        let is_known = |name: &String| {
            let in_root = |root: &Module| root.items.contains(name) || root.imports.contains_key(name);
            self.modules.contains_key(std::slice::from_ref(name)) || root.is_some_and(in_root)
        };
        let mut missing = BTreeSet::new();
        for (user, module) in &self.modules {
            let paths = module.mentions.iter().chain(module.imports.values()).chain(&module.globs);
            let lost = paths.filter(|path| path.first().is_some_and(|name| !is_known(name)));
            missing.extend(lost.map(|path| (user.clone(), path.clone())));
        }
        missing
    }

    /// Paths that lead out of the crate, as each module writes them. Those that start with a local
    /// name are among them.
    pub fn foreign(&self) -> impl Iterator<Item = (&ModulePath, &ModulePath)> {
        self.modules.iter().flat_map(|(user, module)| module.foreign.iter().map(move |path| (user, path)))
    }

    /// The module that defines what `path` names, through re-exports. `None` for a path that leaves
    /// the crate.
    fn owner_of(&self, path: &[String], depth: usize) -> Option<ModulePath> {
        const LONGEST_CHAIN_OF_RE_EXPORTS: usize = 16;
        if depth > LONGEST_CHAIN_OF_RE_EXPORTS {
            return None;
        }
        let mut at: ModulePath = Vec::new();
        for (index, name) in path.iter().enumerate() {
            let mut child = at.clone();
            child.push(name.clone());
            if self.modules.contains_key(&child) {
                at = child;
                continue;
            }
            let module = self.modules.get(&at)?;
            let rest = path.get(index + 1..).unwrap_or_default();
            if module.items.contains(name) {
                return Some(at);
            }
            if let Some(target) = module.imports.get(name) {
                let target: ModulePath = target.iter().chain(rest).cloned().collect();
                return self.owner_of(&target, depth + 1);
            }
            return module.globs.iter().find_map(|glob| {
                let target: ModulePath = glob.iter().chain(path.get(index..)?).cloned().collect();
                self.owner_of(&target, depth + 1).filter(|owner| owner.starts_with(glob))
            });
        }
        Some(at)
    }

    fn read_file(&mut self, file: &Path, folder: &Path, path: &[String]) -> Result<(), String> {
        let text = std::fs::read_to_string(file).map_err(|error| format!("{}: {error}", file.display()))?;
        let parsed = syn::parse_file(&text).map_err(|error| format!("{}: {error}", file.display()))?;
        self.read_items(&parsed.items, folder, path)
    }

    fn read_items(&mut self, items: &[syn::Item], folder: &Path, path: &[String]) -> Result<(), String> {
        self.modules.entry(path.to_vec()).or_default();
        let target = self.target;
        for item in items.iter().filter(|item| !target.lacks(attributes_of(item))) {
            match item {
                syn::Item::Mod(module) => self.read_module(module, folder, path)?,
                syn::Item::Use(import) => self.read_use(&import.tree, path),
                _ => self.read_item(item, path),
            }
        }
        Ok(())
    }

    fn read_module(&mut self, module: &syn::ItemMod, folder: &Path, path: &[String]) -> Result<(), String> {
        let name = module.ident.to_string();
        let child: ModulePath = path.iter().cloned().chain([name.clone()]).collect();
        let inner = folder.join(&name);
        if let Some((_, items)) = &module.content {
            return self.read_items(items, &inner, &child);
        }
        let stated = module.attrs.iter().find_map(path_of);
        let files = match stated {
            Some(path) => vec![folder.join(path)],
            None => vec![folder.join(format!("{name}.rs")), inner.join("mod.rs")],
        };
        match files.iter().find(|file| file.exists()) {
            Some(file) => self.read_file(file, &inner, &child),
            None => Err(format!("no file for module `{}`", child.join("::"))),
        }
    }

    fn read_use(&mut self, tree: &syn::UseTree, path: &[String]) {
        let mut leaves = Vec::new();
        leaves_of(tree, &mut Vec::new(), &mut leaves);
        for (segments, name) in leaves {
            let absolute = self.absolute(&segments, path);
            let Some(module) = self.modules.get_mut(path) else { continue };
            let Some(target) = absolute else {
                module.foreign.insert(segments);
                continue;
            };
            match name {
                Some(name) => {
                    module.imports.insert(name, target);
                }
                None => module.globs.push(target),
            }
        }
    }

    fn read_item(&mut self, item: &syn::Item, path: &[String]) {
        let mut seen = Mentions { paths: Vec::new(), target: self.target };
        seen.visit_item(item);
        let (own, foreign): (Vec<_>, Vec<_>) = seen.paths.into_iter().partition(|written| self.absolute(written, path).is_some());
        let mentions: Vec<_> = own.iter().filter_map(|segments| self.absolute(segments, path)).collect();
        let Some(module) = self.modules.get_mut(path) else { return };
        module.mentions.extend(mentions);
        module.foreign.extend(foreign.into_iter().filter(|path| path.len() > 1));
        if let Some(name) = name_of(item) {
            module.items.insert(name);
        }
    }

    /// Makes a path that starts with `crate`, `self` or `super` absolute. `None` for others: they
    /// name another crate, or something that a `use` of this module already brought in.
    fn absolute(&self, segments: &[String], here: &[String]) -> Option<ModulePath> {
        let mut base: ModulePath = match segments.first()?.as_str() {
            "crate" => Vec::new(),
            "self" | "super" => here.to_vec(),
            first => {
                let child: ModulePath = here.iter().cloned().chain([first.to_owned()]).collect();
                let known = self.modules.contains_key(&child);
                return known.then(|| here.iter().chain(segments).cloned().collect());
            }
        };
        for segment in segments {
            match segment.as_str() {
                "crate" | "self" => {}
                "super" => {
                    base.pop();
                }
                name => base.push(name.to_owned()),
            }
        }
        Some(base)
    }
}

/// Collects the paths that an item mentions, also inside macros.
struct Mentions {
    paths: Vec<Vec<String>>,
    target: Target,
}

impl<'ast> Visit<'ast> for Mentions {
    fn visit_stmt(&mut self, statement: &'ast syn::Stmt) {
        if !self.target.lacks(attributes_of_statement(statement)) {
            syn::visit::visit_stmt(self, statement);
        }
    }

    fn visit_impl_item_fn(&mut self, function: &'ast syn::ImplItemFn) {
        if !self.target.lacks(&function.attrs) {
            syn::visit::visit_impl_item_fn(self, function);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.paths.push(path.segments.iter().map(|segment| segment.ident.to_string()).collect());
        syn::visit::visit_path(self, path);
    }

    fn visit_item_use(&mut self, import: &'ast syn::ItemUse) {
        let mut leaves = Vec::new();
        leaves_of(&import.tree, &mut Vec::new(), &mut leaves);
        self.paths.extend(leaves.into_iter().map(|(segments, _)| segments));
    }

    fn visit_macro(&mut self, invocation: &'ast syn::Macro) {
        self.visit_path(&invocation.path);
        self.read_tokens(invocation.tokens.clone());
    }
}

impl Mentions {
    fn read_tokens(&mut self, tokens: TokenStream) {
        let mut current: Vec<String> = Vec::new();
        for token in tokens {
            match token {
                TokenTree::Ident(name) => current.push(name.to_string()),
                TokenTree::Punct(mark) if mark.as_char() == ':' => {}
                TokenTree::Group(group) => {
                    self.paths.push(std::mem::take(&mut current));
                    self.read_tokens(group.stream());
                }
                _ => self.paths.push(std::mem::take(&mut current)),
            }
        }
        self.paths.push(current);
    }
}

/// Flattens a `use` tree to `(path, name brought in)`; the name is `None` for a glob.
fn leaves_of(tree: &syn::UseTree, prefix: &mut Vec<String>, leaves: &mut Vec<(Vec<String>, Option<String>)>) {
    match tree {
        syn::UseTree::Path(path) => {
            prefix.push(path.ident.to_string());
            leaves_of(&path.tree, prefix, leaves);
            prefix.pop();
        }
        syn::UseTree::Name(name) if name.ident == "self" => {
            leaves.push((prefix.clone(), prefix.last().cloned()));
        }
        syn::UseTree::Name(name) => {
            let path = prefix.iter().cloned().chain([name.ident.to_string()]).collect();
            leaves.push((path, Some(name.ident.to_string())));
        }
        syn::UseTree::Rename(name) => {
            let path = prefix.iter().cloned().chain([name.ident.to_string()]).collect();
            leaves.push((path, Some(name.rename.to_string())));
        }
        syn::UseTree::Glob(_) => leaves.push((prefix.clone(), None)),
        syn::UseTree::Group(group) => {
            for inner in &group.items {
                leaves_of(inner, prefix, leaves);
            }
        }
    }
}

impl Target {
    /// Whether code with these attributes is left out: that of tests, and what the target lacks.
    fn lacks(self, attributes: &[syn::Attribute]) -> bool {
        attributes.iter().any(|attribute| match &attribute.meta {
            syn::Meta::List(list) if list.path.is_ident("cfg") => {
                let text = list.tokens.to_string().replace(' ', "");
                let is_test = text == "test" || text.starts_with("all(test");
                is_test || (self == Self::Page && text == "not(target_family=\"wasm\")")
            }
            _ => false,
        })
    }
}

fn attributes_of(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Use(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Static(item) => &item.attrs,
        _ => &[],
    }
}

fn attributes_of_statement(statement: &syn::Stmt) -> &[syn::Attribute] {
    match statement {
        syn::Stmt::Local(local) => &local.attrs,
        syn::Stmt::Item(item) => attributes_of(item),
        syn::Stmt::Macro(invocation) => &invocation.attrs,
        syn::Stmt::Expr(syn::Expr::If(branch), _) => &branch.attrs,
        syn::Stmt::Expr(syn::Expr::Block(block), _) => &block.attrs,
        syn::Stmt::Expr(..) => &[],
    }
}

/// The file that `#[path = "..."]` names.
fn path_of(attribute: &syn::Attribute) -> Option<String> {
    match &attribute.meta {
        syn::Meta::NameValue(pair) if pair.path.is_ident("path") => match &pair.value {
            syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) => Some(text.value()),
            _ => None,
        },
        _ => None,
    }
}

fn name_of(item: &syn::Item) -> Option<String> {
    let name = match item {
        syn::Item::Const(item) => &item.ident,
        syn::Item::Enum(item) => &item.ident,
        syn::Item::Fn(item) => &item.sig.ident,
        syn::Item::Static(item) => &item.ident,
        syn::Item::Struct(item) => &item.ident,
        syn::Item::Trait(item) => &item.ident,
        syn::Item::Type(item) => &item.ident,
        syn::Item::Union(item) => &item.ident,
        syn::Item::Macro(item) => item.ident.as_ref()?,
        _ => return None,
    };
    Some(name.to_string())
}
