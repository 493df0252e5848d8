//! The documents of text files, piece by piece: no file is held in memory as a whole.

use crate::failure::{Failure, code};
use foretell_executor::data::OnBadSample;
use foretell_executor::regular;
use serde::Deserialize;
use std::fs::File;
use std::io::{BufRead, BufReader, ErrorKind};
use std::path::PathBuf;
use std::slice;

/// The longest piece of a `.txt` file, unless a paragraph is longer. A tokenizer sees one piece at
/// a time, and few tokens reach across the end of a paragraph.
const PIECE: usize = 4 << 20;
/// The longest line of a `.jsonl` file, and the longest paragraph of a `.txt` file.
const LONGEST: usize = 1 << 30;

/// A document, or a part of one.
pub struct Piece {
    pub text: String,
    /// Whether the document is complete with it.
    pub ends_document: bool,
}

/// The documents of several files, one after the other.
pub struct Documents<'a> {
    paths: slice::Iter<'a, PathBuf>,
    open: Option<OpenFile<'a>>,
    policy: OnBadSample,
    bad: u64,
}

struct OpenFile<'a> {
    path: &'a PathBuf,
    reader: BufReader<File>,
    form: Form,
    /// The number of the last line, from 1.
    line: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Form {
    Text,
    JsonLines,
}

#[derive(Deserialize)]
struct JsonLine {
    text: String,
}

impl<'a> Documents<'a> {
    pub fn new(paths: &'a [PathBuf], policy: OnBadSample) -> Self {
        Self { paths: paths.iter(), open: None, policy, bad: 0 }
    }

    /// The number of documents that were left out.
    pub fn bad(&self) -> u64 {
        self.bad
    }

    /// The next piece; `None` after the last.
    pub fn next_piece(&mut self) -> Result<Option<Piece>, Failure> {
        loop {
            if self.open.is_none() {
                let Some(path) = self.paths.next() else { return Ok(None) };
                self.open = Some(OpenFile::open(path)?);
            }
            let Some(file) = &mut self.open else { return Ok(None) };
            match file.next_piece() {
                Ok(Some(piece)) => return Ok(Some(piece)),
                Ok(None) => self.open = None,
                Err(Bad::Unreadable(failure)) => return Err(failure),
                Err(Bad::Document(failure)) if self.policy == OnBadSample::Error => return Err(failure),
                Err(Bad::Document(_)) => {
                    self.bad += 1;
                    // The rest of the text file belongs to the document that is left out.
                    if file.form == Form::Text {
                        self.open = None;
                    }
                }
            }
        }
    }
}

/// Why there is no next piece.
enum Bad {
    /// The document is not valid; others may be.
    Document(Failure),
    Unreadable(Failure),
}

impl<'a> OpenFile<'a> {
    fn open(path: &'a PathBuf) -> Result<Self, Failure> {
        let form = match path.extension().and_then(|ending| ending.to_str()) {
            Some("txt") => Form::Text,
            Some("jsonl") => Form::JsonLines,
            _ => {
                let hint = "give `.txt` files, or `.jsonl` files with a field `text` in each line";
                return Err(Failure::input(code::TEXTS, format!("`{}` is neither", path.display())).hint(hint));
            }
        };
        let unreadable = |error: std::io::Error| {
            Failure::input(code::FILE_UNREADABLE, format!("`{}` cannot be read: {error}", path.display())).hint("check the path")
        };
        let (file, _) = regular::open(path).map_err(|error| match error.kind() {
            ErrorKind::InvalidInput => {
                Failure::input(code::FILE_UNREADABLE, format!("`{}` is not a regular file", path.display()))
                    .hint("give the files in it")
            }
            _ => unreadable(error),
        })?;
        let reader = BufReader::with_capacity(1 << 20, file);
        Ok(Self { path, reader, form, line: 0 })
    }

    fn next_piece(&mut self) -> Result<Option<Piece>, Bad> {
        match self.form {
            Form::Text => self.text_piece(),
            Form::JsonLines => self.json_line(),
        }
    }

    /// The next lines of a text, up to the end of a paragraph.
    fn text_piece(&mut self) -> Result<Option<Piece>, Bad> {
        let mut bytes = Vec::new();
        let ends_document = loop {
            let before = bytes.len();
            if self.read_line(&mut bytes)? == 0 {
                break true;
            }
            let is_blank = bytes.get(before..).is_some_and(|line| line.trim_ascii().is_empty());
            if bytes.len() >= PIECE && is_blank {
                // Look ahead: at the end of the file this piece ends the document.
                let rest = self.reader.fill_buf().map(<[u8]>::is_empty);
                break rest.map_err(|error| self.unreadable(&error))?;
            }
        };
        if bytes.is_empty() {
            return Ok(None);
        }
        let text = String::from_utf8(bytes).map_err(|error| self.bad(&format!("is not UTF-8 text: {}", error.utf8_error())))?;
        Ok(Some(Piece { text, ends_document }))
    }

    fn json_line(&mut self) -> Result<Option<Piece>, Bad> {
        loop {
            let mut bytes = Vec::new();
            if self.read_line(&mut bytes)? == 0 {
                return Ok(None);
            }
            if bytes.trim_ascii().is_empty() {
                continue;
            }
            let line: Result<JsonLine, _> = serde_json::from_slice(&bytes);
            return match line {
                Ok(JsonLine { text }) => Ok(Some(Piece { text, ends_document: true })),
                Err(error) => Err(self.bad(&format!("is not an object with a field `text`: {error}"))),
            };
        }
    }

    /// Appends a line with its end. Returns its length; 0 at the end of the file.
    fn read_line(&mut self, bytes: &mut Vec<u8>) -> Result<usize, Bad> {
        let limit = LONGEST as u64 + 1;
        let read = std::io::Read::take(&mut self.reader, limit).read_until(b'\n', bytes);
        let read = read.map_err(|error| self.unreadable(&error))?;
        self.line += u64::from(read > 0);
        if read > LONGEST || bytes.len() > LONGEST + PIECE {
            let message = format!("`{}`, line {}: is longer than {LONGEST} bytes", self.path.display(), self.line);
            let failure = Failure::input(code::TEXTS, message);
            return Err(Bad::Unreadable(failure.hint("break the text into paragraphs")));
        }
        Ok(read)
    }

    fn unreadable(&self, error: &std::io::Error) -> Bad {
        Bad::Unreadable(Failure::input(code::FILE_UNREADABLE, format!("`{}` cannot be read: {error}", self.path.display())))
    }

    fn bad(&self, problem: &str) -> Bad {
        let hint = "correct it, or use `--on-bad-sample skip`";
        Bad::Document(Failure::input(code::TEXTS, format!("`{}`, line {}: {problem}", self.path.display(), self.line)).hint(hint))
    }
}
