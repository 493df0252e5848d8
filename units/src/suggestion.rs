//! Hints about misspelt names. It must not know what the names are of.

/// The most names that a hint lists completely.
const MOST_SUGGESTED: usize = 24;

/// Number of names that a hint lists in addition to the nearest one, if there are more.
const NEAREST: usize = 5;

/// Lists the known names, after the closest one if it is close: `did you mean `a`? There are `a`,
/// `b``. Of more than 24 names, only the nearest are listed.
pub fn suggest<'a>(written: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let known: Vec<&str> = known.into_iter().collect();
    // A prefix counts as a perfect match: in `dgx-a100` only the end of a name is missing.
    let edits = |name: &str| strsim::levenshtein(&written.to_lowercase(), &name.to_lowercase());
    let distance = |name: &str| if !written.is_empty() && name.starts_with(written) { 0 } else { edits(name) };
    let mut by_distance: Vec<(usize, &str)> = known.iter().map(|name| (distance(name), *name)).collect();
    by_distance.sort();
    let listed = |names: &[&str]| names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
    let all = || listed(&known);
    match by_distance.first().copied() {
        Some((distance, name)) if distance <= 1 + name.chars().count() / 3 && known.len() > MOST_SUGGESTED => {
            let others: Vec<&str> = by_distance.iter().skip(1).take(NEAREST).map(|(_, name)| *name).collect();
            format!("did you mean `{name}`? Of {} others, the nearest are {}", known.len() - 1, listed(&others))
        }
        Some((distance, name)) if distance <= 1 + name.chars().count() / 3 => {
            format!("did you mean `{name}`? There are {}", all())
        }
        Some(_) if known.len() > MOST_SUGGESTED => {
            let nearest: Vec<&str> = by_distance.iter().take(NEAREST).map(|(_, name)| *name).collect();
            format!("of {} names, the nearest are {}", known.len(), listed(&nearest))
        }
        Some(_) => format!("there are {}", all()),
        None => "there are none".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::suggest;

    #[test]
    fn the_closest_name_comes_first_and_long_lists_are_cut() {
        assert_eq!(suggest("gtp2", ["bert", "gpt2"]), "did you mean `gpt2`? There are `bert`, `gpt2`");
        assert_eq!(suggest("zzzzzz", ["bert", "gpt2"]), "there are `bert`, `gpt2`");
        let many: Vec<String> = (0..40).map(|number| format!("model-{number:02}")).collect();
        let hint = suggest("model-7", many.iter().map(String::as_str));
        assert!(hint.starts_with("did you mean `model-") && hint.contains("Of 39 others"), "{hint}");
        assert_eq!(suggest("a", []), "there are none");
    }
}
