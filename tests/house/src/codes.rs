//! The stable codes of errors, read in the source: `#[diagnostic(code(...))]` of error types, and
//! constants of the type `Code`. What each means is its documentation.

use std::collections::BTreeMap;
use syn::{Attribute, Expr, Item, Lit, Meta};

/// Codes, and what each means.
pub type Codes = BTreeMap<String, String>;

/// Adds the codes of a source file.
///
/// # Errors
/// The file is not Rust, or a code is used twice.
pub fn read_codes(source: &str, codes: &mut Codes) -> Result<(), String> {
    let file = syn::parse_file(source).map_err(|error| error.to_string())?;
    let mut open: Vec<&Item> = file.items.iter().collect();
    while let Some(item) = open.pop() {
        match item {
            Item::Mod(module) => open.extend(module.content.iter().flat_map(|(_, items)| items)),
            Item::Enum(item) => {
                for variant in &item.variants {
                    add(codes, code_of_attributes(&variant.attrs), &variant.attrs)?;
                }
            }
            Item::Struct(item) => add(codes, code_of_attributes(&item.attrs), &item.attrs)?,
            Item::Const(item) => add(codes, code_of_constant(&item.expr), &item.attrs)?,
            _ => {}
        }
    }
    Ok(())
}

/// The page that lists the codes: a table for each first word.
pub fn page(codes: &Codes) -> String {
    let mut text = "# Errors\n\n\
        Every error has a stable code. The first line on standard error is `error[CODE]: FILE:LINE:COLUMN: MESSAGE`, without the\n\
        place where there is none; then come the line of the file, with a caret, and `hint:`. With `--json` the parts are fields\n\
        of [the document of a failed command](answers.md): `diagnostic` is the code. A test writes this page from the source.\n"
        .to_owned();
    let mut last = "";
    for (code, meaning) in codes {
        let group = code.split("::").next().unwrap_or_default();
        if group != last {
            text.push_str(&format!("\n## `{group}`\n\n| code | meaning |\n| --- | --- |\n"));
            last = group;
        }
        text.push_str(&format!("| `{code}` | {} |\n", meaning.replace('|', "\\|")));
    }
    text
}

fn add(codes: &mut Codes, code: Option<String>, attributes: &[Attribute]) -> Result<(), String> {
    let Some(code) = code else { return Ok(()) };
    let meaning = first_paragraph(attributes);
    match codes.insert(code.clone(), meaning) {
        None => Ok(()),
        Some(_) => Err(format!("two errors have the code `{code}`")),
    }
}

/// The code in `#[diagnostic(code(a::b), ...)]`.
fn code_of_attributes(attributes: &[Attribute]) -> Option<String> {
    let attribute = attributes.iter().find(|attribute| attribute.path().is_ident("diagnostic"))?;
    let Meta::List(list) = &attribute.meta else { return None };
    let text: String = list.tokens.to_string().split_whitespace().collect();
    let (code, _) = text.strip_prefix("code(")?.split_once(')')?;
    Some(code.to_owned())
}

/// The code in `Code("a::b")`.
fn code_of_constant(value: &Expr) -> Option<String> {
    let Expr::Call(call) = value else { return None };
    let (Expr::Path(function), Some(Expr::Lit(argument))) = (&*call.func, call.args.first()) else { return None };
    match &argument.lit {
        Lit::Str(text) if function.path.is_ident("Code") => Some(text.value()),
        _ => None,
    }
}

/// The first paragraph of the documentation, in one line. Links to items lose their brackets.
fn first_paragraph(attributes: &[Attribute]) -> String {
    let lines = attributes.iter().filter(|attribute| attribute.path().is_ident("doc")).filter_map(|attribute| {
        let Meta::NameValue(pair) = &attribute.meta else { return None };
        let Expr::Lit(value) = &pair.value else { return None };
        let Lit::Str(text) = &value.lit else { return None };
        Some(text.value().trim().to_owned())
    });
    let lines: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
    lines.join(" ").replace("[`", "`").replace("`]", "`")
}

#[cfg(test)]
mod tests {
    use super::{Codes, page, read_codes};

    #[test]
    fn codes_are_read_with_what_they_mean() {
        let source = r#"
            enum Wrong {
                /// It is
                /// too [`Long`].
                ///
                /// More.
                #[error("x")]
                #[diagnostic(code(name::too_long), help("{hint}"))]
                TooLong { hint: String },
                #[diagnostic(transparent)]
                Other(Cause),
            }
            /// It is gone.
            const GONE: Code = Code("file::gone");
        "#;
        let mut codes = Codes::new();
        assert_eq!(read_codes(source, &mut codes), Ok(()));
        let expected = [("file::gone", "It is gone."), ("name::too_long", "It is too `Long`.")];
        assert_eq!(codes, Codes::from(expected.map(|(code, meaning)| (code.to_owned(), meaning.to_owned()))));
        assert!(page(&codes).contains("## `file`\n\n| code | meaning |\n| --- | --- |\n| `file::gone` | It is gone. |\n"));
        assert_eq!(read_codes(source, &mut codes), Err("two errors have the code `file::gone`".into()));
    }
}
