//! Digits of numbers that have separators between thousands.

/// A decimal number without its separators.
pub(crate) fn plain(text: &str) -> Option<String> {
    let (whole, rest) = text.split_at(text.find(['.', 'e', 'E']).unwrap_or(text.len()));
    let whole = if whole.is_empty() { String::new() } else { without_separators(whole)? };
    let is_between_digits = |(before, after): (&str, &str)| {
        before.ends_with(|digit: char| digit.is_ascii_digit()) && after.starts_with(|digit: char| digit.is_ascii_digit())
    };
    let are_separators = rest.match_indices('_').all(|(at, _)| is_between_digits((&rest[..at], &rest[at + 1..])));
    are_separators.then(|| whole + &rest.replace('_', ""))
}

/// The digits of a whole number. It may have commas before every third digit from the end, or
/// underscores between any digits.
pub(crate) fn without_separators(text: &str) -> Option<String> {
    let groups: Vec<&str> = text.split(',').collect();
    let is_digits = |text: &str| !text.is_empty() && text.chars().all(|digit| digit.is_ascii_digit());
    let are_thousands = groups.len() == 1
        || (groups[0].len() <= 3
            && groups[1..].iter().all(|group| group.len() == 3)
            && groups.iter().all(|group| is_digits(group)));
    (are_thousands && groups.concat().split('_').all(is_digits)).then(|| groups.concat().replace('_', ""))
}
