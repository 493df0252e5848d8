//! `foretell generate`: continues a text with a trained language model, to show what it has
//! learned.

use crate::failure::{Failure, code};
use crate::inputs;
use crate::output;
use crate::tokenizer::{self, Tokenizer};
use clap::Args;
use foretell_executor::checkpoint::folder_of_weights;
use foretell_executor::{Generator, NextToken, Sampling};
use foretell_models::Model;
use schemars::JsonSchema;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Continue a text with a language model
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  foretell generate --init runs/first/checkpoints/500 --model gpt2 --tokenizer tokenizer.json --prompt \"Once upon a time\""
)]
pub struct Arguments {
    /// The weights: a safetensors file, the index of several, or a folder of either, such as a
    /// checkpoint
    #[arg(long, value_name = "FILE")]
    init: PathBuf,
    /// The model that the weights are of: a name or a file
    #[arg(long)]
    model: String,
    /// The text to continue
    #[arg(long, value_name = "TEXT")]
    prompt: Option<String>,
    /// Tokens to continue, by number, in place of a text
    #[arg(long, value_name = "IDS", conflicts_with = "prompt", required_unless_present = "prompt", value_delimiter = ',')]
    prompt_tokens: Vec<u32>,
    /// The tokenizer [default: `tokenizer.json` beside the weights; without one, and with a
    /// vocabulary of 256, each byte is a token]
    #[arg(long, value_name = "FILE")]
    tokenizer: Option<PathBuf>,
    /// The most tokens to generate [default: 50, or as many as the model's sequence has space for]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    tokens: Option<u32>,
    /// What to divide logits by; 0 takes the most likely token [default: 0, or 1 with --top-k]
    #[arg(long, value_name = "T")]
    temperature: Option<f64>,
    /// Choose from this many of the most likely tokens [default: all]
    #[arg(long, value_name = "K", value_parser = clap::value_parser!(u32).range(1..))]
    top_k: Option<u32>,
    /// The seed of the choices
    #[arg(long, value_name = "S", default_value = "0")]
    seed: u64,
}

/// How many tokens are generated if the user does not say.
const USUAL_TOKENS: usize = 50;

/// How texts become tokens, and the reverse.
enum Coding {
    Tokenizer(Box<Tokenizer>, PathBuf),
    /// One token per byte, as in data of plain text.
    Bytes,
    /// Tokens are given and shown by number.
    Numbers,
}

/// A prompt's continuation.
struct Continued {
    /// The prompt and the generated text.
    whole: String,
    /// The generated text only.
    new: String,
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let sampling = arguments.sampling()?;
    let named = inputs::model(&arguments.model)?;
    let coding = arguments.coding(&named.model)?;
    let prompt = match &arguments.prompt {
        Some(text) => coding.encode(text)?,
        None => arguments.prompt_tokens.clone(),
    };
    let end = match &coding {
        Coding::Tokenizer(tokenizer, path) => tokenizer::end_of_text(tokenizer, path, None)?.map(|(id, _)| id),
        Coding::Bytes | Coding::Numbers => None,
    };
    let space = named.model.sample().tokens().map_or(0, |(sequence, _)| sequence.saturating_sub(prompt.len()));
    let count = arguments.tokens.map_or(space.clamp(1, USUAL_TOKENS), |count| count as usize);
    let length = prompt.len().saturating_add(count);
    let mut generator = Generator::open(&named.model, &named.name, &arguments.init, length)?;
    let progress = output::progress(count, "generate");
    let made = generator.generate(&prompt, &sampling, |next| {
        progress.inc(1);
        end == Some(next.token)
    })?;
    progress.finish_and_clear();
    let tokens: Vec<u32> = made.iter().map(|next| next.token).collect();
    let text = coding.continued(&prompt, &tokens)?;
    if json {
        return output::json(&document(&prompt, &made, text.as_ref().map(|text| text.new.as_str())));
    }
    match (&arguments.prompt, text) {
        (Some(_), Some(text)) => output::line(&text.whole),
        (None, Some(text)) => output::line(&text.new),
        (_, None) => output::line(&tokens.iter().map(u32::to_string).collect::<Vec<_>>().join(",")),
    }
}

/// The document of `generate`.
#[derive(Debug, Serialize, JsonSchema)]
pub struct GenerateAnswer {
    /// The tokens of the prompt.
    prompt_tokens: Vec<u32>,
    /// The new tokens.
    tokens: Vec<u32>,
    /// The logarithm of each new token's probability.
    log_probabilities: Vec<f64>,
    /// The new text; null without a tokenizer.
    text: Option<String>,
}

fn document(prompt: &[u32], made: &[NextToken], text: Option<&str>) -> GenerateAnswer {
    GenerateAnswer {
        prompt_tokens: prompt.into(),
        tokens: made.iter().map(|next| next.token).collect(),
        log_probabilities: made.iter().map(|next| next.log_probability).collect(),
        text: text.map(String::from),
    }
}

impl Arguments {
    fn sampling(&self) -> Result<Sampling, Failure> {
        let temperature = self.temperature.unwrap_or(if self.top_k.is_some() { 1.0 } else { 0.0 });
        if !temperature.is_finite() || temperature < 0.0 {
            let hint = "give a number of at least 0, such as 0.8";
            return Err(
                Failure::input(code::TOKENIZER, format!("the temperature {temperature} makes no probabilities")).hint(hint)
            );
        }
        Ok(Sampling { temperature, top_k: self.top_k.map(|count| count as usize), seed: self.seed })
    }

    fn coding(&self, model: &Model) -> Result<Coding, Failure> {
        let beside = Some(folder_of_weights(&self.init).join("tokenizer.json")).filter(|path| path.is_file());
        // A build without tokenizers can still continue tokens that are given by number.
        let beside = beside.filter(|_| tokenizer::IS_AVAILABLE || self.prompt.is_some());
        if let Some(path) = self.tokenizer.clone().or(beside) {
            return Ok(Coding::Tokenizer(Box::new(tokenizer::open(&path)?), path));
        }
        match model.sample().tokens() {
            Some((_, 256)) => Ok(Coding::Bytes),
            _ if self.prompt.is_none() => Ok(Coding::Numbers),
            _ => {
                let hint = "give its `tokenizer.json` with `--tokenizer`, or tokens with `--prompt-tokens`";
                Err(Failure::input(code::OPTION_MISSING, "a text needs the tokenizer of the model").hint(hint))
            }
        }
    }
}

impl Coding {
    fn encode(&self, text: &str) -> Result<Vec<u32>, Failure> {
        match self {
            Coding::Tokenizer(tokenizer, path) => {
                tokenizer.encode(text).map_err(|error| failed(path, "encode the prompt", &error))
            }
            Coding::Bytes | Coding::Numbers => Ok(text.bytes().map(u32::from).collect()),
        }
    }

    /// The text of a prompt and of the tokens after it; `None` if tokens are shown by number.
    fn continued(&self, prompt: &[u32], tokens: &[u32]) -> Result<Option<Continued>, Failure> {
        // Some tokenizers drop the space before the first word that they decode, so the new tokens
        // are decoded together with the prompt.
        let (before, whole) = (self.decode(prompt)?, self.decode(&[prompt, tokens].concat())?);
        let (Some(before), Some(whole)) = (before, whole) else { return Ok(None) };
        let new = match whole.strip_prefix(&before) {
            Some(new) => new.to_owned(),
            // The first new token changes the prompt's end, such as half a character.
            None => self.decode(tokens)?.unwrap_or_default(),
        };
        Ok(Some(Continued { whole, new }))
    }

    /// The text of tokens; `None` if tokens are shown by number.
    fn decode(&self, tokens: &[u32]) -> Result<Option<String>, Failure> {
        match self {
            Coding::Tokenizer(tokenizer, path) => {
                tokenizer.decode(tokens).map(Some).map_err(|error| failed(path, "decode the tokens", &error))
            }
            Coding::Bytes => {
                let byte = |&token: &u32| u8::try_from(token).expect("invariant: the model's tokens are bytes");
                let bytes: Vec<u8> = tokens.iter().map(byte).collect();
                Ok(Some(String::from_utf8_lossy(&bytes).into_owned()))
            }
            Coding::Numbers => Ok(None),
        }
    }
}

fn failed(path: &Path, doing: &str, error: &str) -> Failure {
    Failure::input(code::TOKENIZER, format!("`{}` cannot {doing}: {error}", path.display()))
        .hint("use the tokenizer of the model")
}
