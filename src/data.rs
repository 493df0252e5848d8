//! `foretell data`: prepares data for training.

mod documents;

use crate::failure::{Failure, code};
use crate::output;
use crate::tokenizer::{self, Tokenizer};
use crate::training::BadSamplePolicy;
use clap::{Args, Subcommand};
use documents::Documents;
use foretell_executor::data::TokenFileWriter;
use foretell_units::Bytes;
use indicatif::ProgressBar;
use schemars::JsonSchema;
use serde::Serialize;
use std::path::PathBuf;

/// Prepare data for training
#[derive(Debug, Args)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Tokenize(Tokenize),
}

/// Turn texts into a file of tokens, which `execute --data` reads without loading it
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  foretell data tokenize --tokenizer tokenizer.json books.txt web.jsonl -o corpus.tokens\n  foretell execute --plan plan.yaml --data corpus.tokens"
)]
struct Tokenize {
    /// The tokenizer, as Hugging Face's models have it
    #[arg(long, value_name = "FILE")]
    tokenizer: PathBuf,
    /// Texts: `.txt`, each one document, or `.jsonl` with a document in the field `text` of each
    /// line
    #[arg(value_name = "IN", required = true)]
    inputs: Vec<PathBuf>,
    /// The file to write; `.tokens` is its usual ending
    #[arg(short, long, value_name = "OUT")]
    output: PathBuf,
    /// The token between documents [default: the tokenizer's own, such as <|endoftext|>]
    #[arg(long, value_name = "TOKEN")]
    end_of_text: Option<String>,
    /// What to do with a line that is not a document
    #[arg(long, value_name = "WHAT", default_value = "error")]
    on_bad_sample: BadSamplePolicy,
}

/// About how many bytes of text are tokenized at once, on all cores.
const BATCH: usize = 8 << 20;

/// The document of `data tokenize`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct TokenizeAnswer {
    /// The file of tokens.
    output: String,
    /// Its tokens.
    tokens: u64,
    /// The documents that the tokens come from.
    documents: u64,
    /// One more than the largest token of the tokenizer.
    vocabulary: usize,
    /// Size of a token in the file.
    bytes_per_token: usize,
    /// The token that ends a document.
    end_of_text: Option<String>,
    /// Documents that were left out.
    bad_samples: u64,
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let Command::Tokenize(arguments) = &arguments.command;
    tokenize(arguments, json)
}

fn tokenize(arguments: &Tokenize, json: bool) -> Result<(), Failure> {
    let tokenizer = tokenizer::open(&arguments.tokenizer)?;
    let vocabulary = tokenizer.vocabulary();
    let end = tokenizer::end_of_text(&tokenizer, &arguments.tokenizer, arguments.end_of_text.as_deref())?;
    if end.is_none() {
        output::note("the tokenizer has no usual token for the end of a text, so none stands between documents");
    }
    let mut writer = TokenFileWriter::create(&arguments.output, vocabulary).map_err(unwritten)?;
    let mut documents = Documents::new(&arguments.inputs, arguments.on_bad_sample.into());
    let bar = output::spinner("tokenize");
    let written = write_tokens(arguments, &tokenizer, end.as_ref().map(|(id, _)| *id), &mut documents, &mut writer, &bar);
    bar.finish_and_clear();
    let written = written?;
    let (tokens, token_bytes) = (writer.count(), writer.token_bytes());
    if tokens == 0 {
        return Err(
            Failure::input(code::TEXTS, "the texts hold no tokens, so nothing is written").hint("give texts that are not empty")
        );
    }
    writer.finish().map_err(unwritten)?;
    let (bad, end) = (documents.bad(), end.map(|(_, name)| name));
    if json {
        return output::json(&TokenizeAnswer {
            output: arguments.output.display().to_string(),
            tokens,
            documents: written,
            vocabulary,
            bytes_per_token: token_bytes,
            end_of_text: end,
            bad_samples: bad,
        });
    }
    let left_out = if bad == 0 { String::new() } else { format!("; {bad} bad documents were left out") };
    output::line(&format!(
        "{tokens} tokens of {written} documents, {token_bytes} bytes each, below {vocabulary}, are in {}{left_out}",
        arguments.output.display()
    ))
}

/// Writes the tokens of all documents, and shows the progress. Returns the number of documents.
fn write_tokens(
    arguments: &Tokenize,
    tokenizer: &Tokenizer,
    end: Option<u32>,
    documents: &mut Documents<'_>,
    writer: &mut TokenFileWriter,
    bar: &ProgressBar,
) -> Result<u64, Failure> {
    // An input that is not a file gives an error when its documents are read.
    let whole = arguments.inputs.iter().filter_map(|input| Some(std::fs::metadata(input).ok()?.len())).sum();
    let (mut written, mut read) = (0_u64, 0_u64);
    loop {
        let (mut texts, mut bytes, mut ends) = (Vec::new(), 0, Vec::new());
        while bytes < BATCH
            && let Some(piece) = documents.next_piece()?
        {
            bytes += piece.text.len();
            written += u64::from(piece.ends_document);
            ends.push(piece.ends_document);
            texts.push(piece.text);
        }
        if texts.is_empty() {
            return Ok(written);
        }
        read += bytes as u64;
        let encoded = tokenizer.encode_batch(texts).map_err(|error| {
            Failure::input(code::TOKENIZER, format!("`{}` cannot encode the texts: {error}", arguments.tokenizer.display()))
        })?;
        for (encoding, ends_document) in encoded.iter().zip(ends) {
            writer.push(encoding).map_err(unwritten)?;
            if let Some(id) = end.filter(|_| ends_document) {
                writer.push(&[id]).map_err(unwritten)?;
            }
        }
        bar.set_message(format!("{} of {}, {} tokens", Bytes::new(read), Bytes::new(whole), writer.count()));
    }
}

fn unwritten(error: foretell_executor::data::DataError) -> Failure {
    Failure::of_undone(error)
}
