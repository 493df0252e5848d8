//! Splits a shell script into words. Variables are not yet expanded.

/// A part of a script.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Token {
    /// A word.
    Word(Word),
    /// The end of a command.
    End,
    /// `&&`
    And,
    /// `||`
    Or,
    /// `(`
    Open,
    /// `)`
    Close,
}

/// A word.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Word {
    /// Its parts.
    pub(super) pieces: Vec<Piece>,
    /// Whether a part is in quotes, so that an empty word counts, too.
    pub(super) is_quoted: bool,
}

/// A part of a word.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Piece {
    /// Text.
    Literal(String),
    /// `$NAME`, `${NAME:-default}` or `${NAME[@]}`.
    Variable { name: String, default: Option<String>, is_quoted: bool, is_all: bool },
    /// `$((...))`
    Sum(String),
}

impl Word {
    /// The text, if it has nothing to expand.
    pub(super) fn literal(&self) -> Option<&str> {
        match &self.pieces[..] {
            [Piece::Literal(text)] => Some(text),
            _ => None,
        }
    }

    /// The variable that the word assigns, and whether it appends to it.
    pub(super) fn assigned(&self) -> Option<(&str, bool)> {
        let Some(Piece::Literal(text)) = self.pieces.first() else { return None };
        let (name, _) = text.split_once('=')?;
        let (name, adds) = name.strip_suffix('+').map_or((name, false), |name| (name, true));
        let begins = name.chars().next().is_some_and(|first| first.is_ascii_alphabetic() || first == '_');
        (begins && name.chars().all(is_name)).then_some((name, adds))
    }

    /// Whether nothing comes after the `=`.
    pub(super) fn is_bare_assignment(&self) -> bool {
        !self.is_quoted && self.literal().is_some_and(|text| text.ends_with('='))
    }

    /// What comes after the `=`.
    pub(super) fn value(&self) -> Word {
        let mut value = self.clone();
        if let Some(Piece::Literal(text)) = value.pieces.first_mut() {
            *text = text.split_once('=').map_or_else(String::new, |(_, rest)| rest.into());
        }
        value
    }

    fn push(&mut self, character: char) {
        match self.pieces.last_mut() {
            Some(Piece::Literal(text)) => text.push(character),
            _ => self.pieces.push(Piece::Literal(character.into())),
        }
    }
}

fn is_name(character: char) -> bool {
    character.is_ascii_alphanumeric() || character == '_'
}

type Characters<'a> = std::iter::Peekable<std::str::Chars<'a>>;

/// Splits a script.
pub(super) fn tokens(text: &str) -> Vec<Token> {
    let mut tokens = Vec::new();
    let mut word: Option<Word> = None;
    let mut quote = None;
    let mut skips_word = false;
    let mut characters = text.chars().peekable();
    macro_rules! end_word {
        () => {
            if let Some(word) = word.take() {
                if !std::mem::take(&mut skips_word) {
                    tokens.push(Token::Word(word));
                }
            }
        };
    }
    while let Some(character) = characters.next() {
        match (quote, character) {
            (Some(open), close) if open == close => quote = None,
            (Some('\''), other) => word.get_or_insert_default().push(other),
            (_, '$') => {
                let word = word.get_or_insert_default();
                match variable(&mut characters, quote.is_some()) {
                    Some(piece) => word.pieces.push(piece),
                    None => word.push('$'),
                }
            }
            (_, '\\') => match characters.next() {
                None | Some('\n') => {}
                Some('\r') => _ = characters.next_if_eq(&'\n'),
                Some(next) => word.get_or_insert_default().push(next),
            },
            (Some(_), other) => word.get_or_insert_default().push(other),
            // `--flag value `# a comment` \`
            (None, '`') if characters.clone().find(|next| *next != ' ') == Some('#') => {
                while characters.next().is_some_and(|next| next != '`') {}
            }
            (None, '"' | '\'') => {
                quote = Some(character);
                word.get_or_insert_default().is_quoted = true;
            }
            (None, '#') if word.is_none() => while characters.next_if(|&next| next != '\n').is_some() {},
            (None, '<') if let Some(text) = placeholder(&characters) => {
                word.get_or_insert_default().pieces.push(Piece::Literal(format!("<{text}>")));
                (0..=text.chars().count()).for_each(|_| _ = characters.next());
            }
            (None, '<') if let Some((assignment, rest)) = document(&tokens, word.as_ref(), &characters) => {
                end_word!();
                tokens.push(Token::End);
                tokens.extend(self::tokens(&assignment));
                tokens.push(Token::End);
                characters = rest;
            }
            (None, '>' | '<') => {
                // A redirection, with the number before it and the file after it.
                if word.as_ref().and_then(Word::literal).is_some_and(|text| text.chars().all(|digit| digit.is_ascii_digit())) {
                    word = None;
                }
                end_word!();
                while characters.next_if(|next| matches!(next, '>' | '<' | '&')).is_some() {}
                skips_word = true;
            }
            (None, '&') if characters.peek() == Some(&'>') => {}
            // Not a pipe: `Et*3|t*4L` is a layout of Megatron's pipeline.
            (None, '|') if word.is_some() && characters.peek().is_some_and(|next| next.is_ascii_alphanumeric()) => {
                word.get_or_insert_default().push('|');
            }
            (None, '\n' | ';' | '|' | '&') => {
                end_word!();
                skips_word = false;
                let is_twice = matches!(character, '|' | '&') && characters.next_if_eq(&character).is_some();
                tokens.push(match (is_twice, character) {
                    (true, '&') => Token::And,
                    (true, _) => Token::Or,
                    (false, _) => Token::End,
                });
            }
            (None, '(' | ')') => {
                end_word!();
                tokens.push(if character == '(' { Token::Open } else { Token::Close });
            }
            (None, blank) if blank.is_whitespace() => end_word!(),
            (None, other) => word.get_or_insert_default().push(other),
        }
    }
    end_word!();
    tokens
}

/// The text of a placeholder such as `<PATH TO DATA>`, which the reader should replace. `None` for
/// a redirection, whose file ends with a blank or the line.
fn placeholder(behind: &Characters<'_>) -> Option<String> {
    let line: String = behind.clone().take_while(|&next| next != '\n').collect();
    let (text, _) = line.split_once('>')?;
    let is_text = text.chars().all(|letter| is_name(letter) || " -./:,".contains(letter));
    let begins = text.starts_with(|first: char| first.is_ascii_alphabetic());
    (is_text && begins && !text.ends_with(' ')).then(|| text.to_owned())
}

/// The assignment that `read NAME <<END` makes, and the script after the text. The assignment is
/// empty for other commands. `None` if no such text begins here.
fn document<'a>(before: &[Token], last: Option<&Word>, behind: &Characters<'a>) -> Option<(String, Characters<'a>)> {
    let mut rest = behind.clone();
    rest.next_if_eq(&'<')?;
    if rest.peek() == Some(&'<') {
        return None;
    }
    let is_indented = rest.next_if_eq(&'-').is_some();
    let mut next_line = || -> Option<String> {
        rest.peek()?;
        Some(rest.by_ref().take_while(|&next| next != '\n').collect())
    };
    let first = next_line()?;
    let end = first.split_whitespace().next()?.trim_matches(['"', '\'', '\\']).to_owned();
    let mut body = String::new();
    while let Some(line) = next_line() {
        if (if is_indented { line.trim() } else { line.trim_end() }) == end {
            break;
        }
        body.push_str(&line);
        body.push('\n');
    }
    let literal = |token: &Token| if let Token::Word(word) = token { word.literal().map(str::to_owned) } else { None };
    let start = before.iter().rposition(|token| !matches!(token, Token::Word(_))).map_or(0, |at| at + 1);
    let words: Vec<String> = before[start..].iter().filter_map(literal).collect();
    let name = last.and_then(Word::literal).map(str::to_owned).or_else(|| words.last().cloned());
    let is_read = words.first().is_some_and(|word| word == "read");
    let assigned = name.filter(|name| is_read && name.chars().all(is_name));
    let assignment = assigned.map_or_else(String::new, |name| format!("{name}=\"{}\"", body.replace('"', "\\\"")));
    Some((assignment, rest))
}

/// Reads what follows a `$`. `None` if it is a plain dollar sign.
fn variable(characters: &mut Characters<'_>, is_quoted: bool) -> Option<Piece> {
    let plain = |name: String| Piece::Variable { name, default: None, is_quoted, is_all: true };
    match characters.peek().copied()? {
        '(' => {
            let inner = until_closed(characters, '(', ')');
            match inner.strip_prefix('(').and_then(|inner| inner.strip_suffix(')')) {
                Some(sum) => Some(Piece::Sum(sum.trim().into())),
                // `expr` is the only command whose output is known.
                None => match inner.trim_start().strip_prefix("expr ") {
                    Some(sum) => Some(Piece::Sum(sum.trim().replace(['\\', '"', '\''], ""))),
                    None if is_own_folder(&inner) => Some(Piece::Literal(".".into())),
                    None => Some(plain(format!("({inner})"))),
                },
            }
        }
        '{' => {
            let inner = until_closed(characters, '{', '}');
            let name: String = inner.chars().take_while(|&letter| is_name(letter)).collect();
            let rest = inner.get(name.len()..).unwrap_or_default();
            if name.is_empty() && (rest.starts_with('@') || rest.starts_with('*')) {
                return Some(plain("@".into()));
            }
            let default = rest.strip_prefix(":-").or_else(|| rest.strip_prefix('-')).or_else(|| rest.strip_prefix(":="));
            if name == "PWD" && rest.is_empty() {
                return Some(Piece::Literal(".".into()));
            }
            let is_known = rest.is_empty() || default.is_some() || matches!(rest, "[@]" | "[*]");
            let name = if is_known && !name.is_empty() { name } else { format!("{{{inner}}}") };
            Some(Piece::Variable { name, default: default.map(unquoted), is_quoted, is_all: rest.starts_with('[') })
        }
        '@' | '*' => {
            characters.next();
            Some(plain("@".into()))
        }
        '#' => {
            characters.next();
            Some(plain("#".into()))
        }
        first if is_name(first) => {
            let mut name = String::new();
            while let Some(letter) = characters.next_if(|&letter| is_name(letter)) {
                name.push(letter);
                if first.is_ascii_digit() {
                    break;
                }
            }
            if name == "PWD" {
                return Some(Piece::Literal(".".into()));
            }
            Some(Piece::Variable { name, default: None, is_quoted, is_all: false })
        }
        _ => None,
    }
}

/// Whether a command prints the folder of the script or the current folder, in which other files
/// are looked for: `pwd`, `dirname "$0"`, `cd "$(dirname "$0")" && pwd`.
fn is_own_folder(command: &str) -> bool {
    let plain =
        command.replace(['"', '\'', '$', '{', '}', '(', ')'], " ").replace("[0]", "").replace("&&", " ").replace(';', " ");
    let is_switch = |word: &&str| ["--", "-P", "-L", "-f", ">/dev/null", "&>/dev/null", "2>&1", "2>/dev/null"].contains(word);
    let words: Vec<&str> = plain.split_whitespace().filter(|word| !is_switch(word)).collect();
    let is_script = |word: &str| ["0", "BASH_SOURCE"].contains(&word);
    let is_its_folder = |words: &[&str]| match words {
        ["dirname", script] | ["dirname", "readlink" | "realpath", script] => is_script(script),
        _ => false,
    };
    match &words[..] {
        ["pwd"] => true,
        ["cd", folder @ .., "pwd"] => is_its_folder(folder),
        folder => is_its_folder(folder),
    }
}

fn unquoted(text: &str) -> String {
    text.trim_matches(['"', '\'']).into()
}

/// The text up to the bracket that closes the next one.
fn until_closed(characters: &mut Characters<'_>, open: char, close: char) -> String {
    characters.next();
    let mut inner = String::new();
    let mut depth = 1usize;
    for character in characters.by_ref() {
        if character == open {
            depth += 1;
        } else if character == close {
            depth -= 1;
            if depth == 0 {
                break;
            }
        }
        inner.push(character);
    }
    inner
}

/// The value of an arithmetic expression of whole numbers and variables. `None` if it has other
/// parts.
pub(super) fn sum(text: &str, value: &dyn Fn(&str) -> Option<i64>) -> Option<i64> {
    let spaced: String = text.chars().filter(|letter| !matches!(letter, '$' | '{' | '}')).collect();
    let mut parser = Sum { rest: spaced.trim(), value };
    let total = parser.terms(0)?;
    parser.rest.trim().is_empty().then_some(total)
}

/// The deepest nesting of brackets.
const DEEPEST: usize = 32;

struct Sum<'a> {
    rest: &'a str,
    value: &'a dyn Fn(&str) -> Option<i64>,
}

impl Sum<'_> {
    fn next_of(&mut self, signs: &[char]) -> Option<char> {
        self.rest = self.rest.trim_start();
        let sign = self.rest.chars().next().filter(|sign| signs.contains(sign))?;
        self.rest = self.rest.get(1..).unwrap_or_default();
        Some(sign)
    }

    fn terms(&mut self, depth: usize) -> Option<i64> {
        let mut total = self.factors(depth)?;
        while let Some(sign) = self.next_of(&['+', '-']) {
            let next = self.factors(depth)?;
            total = if sign == '+' { total.checked_add(next)? } else { total.checked_sub(next)? };
        }
        Some(total)
    }

    fn factors(&mut self, depth: usize) -> Option<i64> {
        let mut product = self.factor(depth)?;
        while let Some(sign) = self.next_of(&['*', '/', '%']) {
            let next = self.factor(depth)?;
            product = match sign {
                '*' => product.checked_mul(next)?,
                '/' => product.checked_div(next)?,
                _ => product.checked_rem(next)?,
            };
        }
        Some(product)
    }

    fn factor(&mut self, depth: usize) -> Option<i64> {
        if depth < DEEPEST && self.next_of(&['(']).is_some() {
            let inner = self.terms(depth + 1)?;
            return self.next_of(&[')']).map(|_| inner);
        }
        self.rest = self.rest.trim_start();
        let length = self.rest.chars().take_while(|&letter| is_name(letter)).count();
        let (name, rest) = self.rest.split_at_checked(length).filter(|(name, _)| !name.is_empty())?;
        self.rest = rest;
        name.parse().ok().or_else(|| (self.value)(name))
    }
}
