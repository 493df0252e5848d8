//! The settings that a file states, by their paths, and how each was handled. All frameworks'
//! readers use it: a reader takes the settings that it understands, names those without effect, and
//! refuses those that no plan expresses. [`Stated::finish`] accounts for the rest, so that no
//! setting is lost. It must not know frameworks.

mod refusals;
mod values;

pub(super) use values::{decimal, unexpanded_in};

use super::FrameworkError;
use super::deciding::may_decide;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, BTreeSet};
pub(super) use values::flatten;
use values::{is_off, yaml_error};

/// How a file writes its settings, for messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Notation {
    /// `--name value`
    Flags,
    /// `section.name = value`
    Toml,
    /// `section.name: value`
    Json,
}

/// How the settings of a file were handled.
#[derive(Debug, Default)]
pub(super) struct Account {
    /// Settings that were not read.
    pub(super) unread: Vec<String>,
    /// Settings at their default, switched off, or without effect on a step.
    pub(super) without_effect: Vec<String>,
    /// Values that the file leaves open, with their source, a sentence each.
    pub(super) assumed: Vec<String>,
    /// Whether the file states the bucket: how many bytes are reduced together.
    pub(super) states_bucket: bool,
}

/// The settings of a file.
pub(super) struct Stated {
    notation: Notation,
    /// Path of the section, for messages; empty for the complete file.
    prefix: String,
    settings: BTreeMap<String, Value>,
    /// For each renamed setting, its name in the file.
    written_as: BTreeMap<String, String>,
    /// Variables of a script that are not expanded, each with the reason.
    pub(super) unexpanded: BTreeMap<String, String>,
    /// Whether a switch may be a word that transformers' `string_to_bool` reads.
    pub(super) takes_words: bool,
    taken: BTreeSet<String>,
    account: Account,
}

/// Parses an object of JSON, or a mapping of YAML. `what` is the expected content, for the hint.
pub(super) fn object_of(text: &str, what: &str) -> Result<Map<String, Value>, FrameworkError> {
    let form = |reason: String| FrameworkError::Form { reason, hint: format!("give {what}") };
    let value: Value = match serde_json::from_str(text) {
        Ok(value) => value,
        Err(error) if text.trim_start().starts_with(['{', '[']) => return Err(form(error.to_string())),
        Err(_) => {
            let options = serde_saphyr::options! { with_snippet: false };
            let parsed = serde_saphyr::from_str_with_options(text, options);
            parsed.map_err(|error| form(yaml_error(&error.to_string())))?
        }
    };
    match value {
        Value::Object(object) => Ok(object),
        _ => Err(form("it is no object".into())),
    }
}

impl Stated {
    /// The settings of an object. Nested settings have paths with dots.
    pub(super) fn new(object: Map<String, Value>, notation: Notation) -> Self {
        let mut settings = BTreeMap::new();
        for (name, value) in object {
            flatten(name, value, &mut settings);
        }
        Self::of_settings(settings, notation, String::new())
    }

    fn of_settings(settings: BTreeMap<String, Value>, notation: Notation, prefix: String) -> Self {
        Self {
            notation,
            prefix,
            settings,
            written_as: BTreeMap::new(),
            unexpanded: BTreeMap::new(),
            takes_words: false,
            taken: BTreeSet::new(),
            account: Account::default(),
        }
    }

    /// Parses an object of JSON, or a mapping of YAML.
    pub(super) fn parse(text: &str, what: &str) -> Result<Self, FrameworkError> {
        Ok(Self::new(object_of(text, what)?, Notation::Json))
    }

    /// Moves out a section: all settings under `name`. Finish it before the rest.
    pub(super) fn section(&mut self, name: &str) -> Self {
        let start = format!("{name}.");
        let inside: Vec<String> = self.settings.keys().filter(|path| path.starts_with(&start)).cloned().collect();
        let moved = inside.into_iter().filter_map(|path| {
            let value = self.settings.remove(&path)?;
            Some((path.strip_prefix(&start)?.to_string(), value))
        });
        let settings = moved.collect();
        Self::of_settings(settings, self.notation, format!("{}{start}", self.prefix))
    }

    /// Adds the account of a section.
    pub(super) fn absorb(&mut self, account: Account) {
        self.account.unread.extend(account.unread);
        self.account.without_effect.extend(account.without_effect);
        self.account.assumed.extend(account.assumed);
        self.account.states_bucket |= account.states_bucket;
    }

    /// Notes that the file states the bucket, even if it is our default.
    pub(super) fn state_bucket(&mut self) {
        self.account.states_bucket = true;
    }

    /// Whether a setting was taken.
    pub(super) fn is_taken(&self, name: &str) -> bool {
        self.taken.contains(name)
    }

    /// Overwrites settings by those of `later`, except those that `later` has taken.
    pub(super) fn replace_by(&mut self, later: Self) {
        let taken = later.taken;
        self.settings.extend(later.settings.into_iter().filter(|(name, _)| !taken.contains(name)));
        self.unexpanded.extend(later.unexpanded);
    }

    /// The value of a setting, without taking it.
    pub(super) fn peek(&self, name: &str) -> Option<&Value> {
        self.settings.get(name)
    }

    /// Adds the account of another file.
    pub(super) fn absorb_others(&mut self, unread: Vec<String>, without_effect: Vec<String>) {
        self.account.unread.extend(unread);
        self.account.without_effect.extend(without_effect);
    }

    /// Whether there are no settings.
    pub(super) fn is_empty(&self) -> bool {
        self.settings.is_empty()
    }

    /// Whether a setting, or a section with this name, is stated. Does not take it.
    pub(super) fn has(&self, name: &str) -> bool {
        self.settings.get(name).is_some_and(|value| !value.is_null()) || self.has_section(name)
    }

    /// Whether there are settings under this name.
    pub(super) fn has_section(&self, name: &str) -> bool {
        let start = format!("{name}.");
        self.settings.keys().any(|path| path.starts_with(&start))
    }

    /// Drops a switch that has no effect next to another setting.
    pub(super) fn drop_switch(&mut self, name: &str) {
        if self.settings.get(name) == Some(&Value::Bool(true)) {
            self.drop(name);
        }
    }

    /// Drops a setting that has no effect, so that another one can be renamed to its name.
    pub(super) fn drop(&mut self, name: &str) {
        if self.settings.contains_key(name) {
            self.account.without_effect.push(self.written(name));
            self.settings.remove(name);
        }
    }

    /// Settings with one of these values that were not taken.
    pub(super) fn with_value(&self, values: &[&str]) -> Vec<String> {
        let has = |value: &Value| value.as_str().is_some_and(|value| values.contains(&value));
        self.settings
            .iter()
            .filter(|(name, value)| has(value) && !self.taken.contains(*name))
            .map(|(name, _)| name.clone())
            .collect()
    }

    /// Whether the file leaves a setting to its caller (`"auto"`). If so, takes it.
    pub(super) fn is_auto(&mut self, name: &str) -> bool {
        let is_auto = self.settings.get(name).is_some_and(|value| value == "auto");
        if is_auto {
            self.taken.insert(name.into());
        }
        is_auto
    }

    /// Renames a setting from `older` to `newer`. Fails if both are stated with different values.
    pub(super) fn rename(&mut self, older: &str, newer: &str) -> Result<(), FrameworkError> {
        let Some(value) = self.settings.get(older).cloned() else { return Ok(()) };
        match self.settings.get(newer) {
            Some(other) if *other != value => {
                let reason = format!("{} and {} are names of one setting", self.written(older), self.written(newer));
                return Err(FrameworkError::Form { reason, hint: "keep one of them".into() });
            }
            _ => {}
        }
        self.settings.remove(older);
        if self.settings.insert(newer.into(), value).is_none() {
            let own = self.written_as.remove(older).unwrap_or_else(|| older.into());
            self.written_as.insert(newer.into(), own);
        }
        Ok(())
    }

    /// The value of a setting; `None` if it is missing, null, or `"auto"`.
    pub(super) fn take(&mut self, name: &str) -> Option<Value> {
        self.taken.insert(name.into());
        self.settings.get(name).filter(|value| !value.is_null() && **value != "auto").cloned()
    }

    /// A whole number above 0.
    pub(super) fn size(&mut self, name: &str) -> Result<Option<usize>, FrameworkError> {
        match self.count(name)? {
            Some(0) => Err(self.wrong(name, "a whole number above 0")),
            size => Ok(size),
        }
    }

    /// A whole number, which may be written with an exponent (`5e8`) or as a text (`"3"`).
    pub(super) fn count(&mut self, name: &str) -> Result<Option<usize>, FrameworkError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let whole = |number: f64| Some(number as usize).filter(|_| number >= 0.0 && number.fract() == 0.0 && number <= 1e15);
        let exact = value.as_u64().and_then(|count| usize::try_from(count).ok());
        let text = value.as_str().map(|text| text.trim().replace('_', ""));
        let count = exact
            .or_else(|| whole(value.as_f64()?))
            .or_else(|| text.as_ref()?.parse().ok())
            .or_else(|| whole(text.as_ref()?.parse().ok()?));
        count.map(Some).ok_or_else(|| self.wrong(name, "a whole number"))
    }

    /// A number, which may be a text.
    pub(super) fn number(&mut self, name: &str) -> Result<Option<f32>, FrameworkError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        let text = value.as_str().and_then(|text| text.trim().parse::<f64>().ok());
        let number = value.as_f64().or(text).map(|number| number as f32).filter(|number| number.is_finite());
        number.map(Some).ok_or_else(|| self.wrong(name, "a number"))
    }

    /// A switch.
    pub(super) fn flag(&mut self, name: &str) -> Result<Option<bool>, FrameworkError> {
        let value = self.take(name);
        let Some(value) = value else { return Ok(None) };
        let text = value.as_str().map(str::to_ascii_lowercase);
        match (value.as_bool(), text.as_deref()) {
            (Some(flag), _) => Ok(Some(flag)),
            (None, Some("true")) => Ok(Some(true)),
            (None, Some("false")) => Ok(Some(false)),
            (None, Some("t" | "yes" | "y" | "1")) if self.takes_words => Ok(Some(true)),
            (None, Some("f" | "no" | "n" | "0")) if self.takes_words => Ok(Some(false)),
            _ if self.notation == Notation::Flags => {
                let reason = format!("{}: the argument takes no value, and the words belong to no other", self.written(name));
                Err(FrameworkError::Form { reason, hint: self.shell_hint(&value) })
            }
            _ => Err(self.wrong(name, "true or false")),
        }
    }

    /// Whether a switch is on.
    pub(super) fn is_on(&mut self, name: &str) -> Result<bool, FrameworkError> {
        Ok(self.flag(name)?.unwrap_or(false))
    }

    /// Refuses switches without effect whose value is an unexpanded variable: it could contain any
    /// arguments.
    pub(super) fn refuse_variables(&self, switches: &[&str]) -> Result<(), FrameworkError> {
        let is_open = |name: &&&str| self.settings.get(**name).and_then(Value::as_str).is_some_and(is_variable);
        match switches.iter().find(is_open).filter(|_| self.notation == Notation::Flags) {
            None => Ok(()),
            Some(name) => Err(self.wrong(name, "true or false, and the variable may hold any arguments")),
        }
    }

    /// A text.
    pub(super) fn text(&mut self, name: &str) -> Result<Option<String>, FrameworkError> {
        match self.take(name) {
            None => Ok(None),
            Some(Value::String(text)) if !(self.notation == Notation::Flags && text.contains('$')) => Ok(Some(text)),
            Some(_) => Err(self.wrong(name, "one word")),
        }
    }

    /// A text. YAML reads a bare `no` as a switch, so `false` is returned as `no`.
    pub(super) fn word(&mut self, name: &str) -> Result<Option<String>, FrameworkError> {
        match self.settings.get(name) {
            Some(Value::Bool(false)) => {
                self.taken.insert(name.into());
                Ok(Some("no".into()))
            }
            _ => self.text(name),
        }
    }

    /// Sets and takes a setting that the file does not state.
    pub(super) fn provide(&mut self, name: &str, value: Value) {
        if self.settings.get(name).is_none_or(Value::is_null) {
            self.settings.insert(name.into(), value);
            self.taken.insert(name.into());
        }
    }

    /// Removes a setting and all settings under it, as if the file had not stated them. Returns
    /// whether there were any.
    pub(super) fn remove(&mut self, name: &str) -> bool {
        let before = self.settings.len();
        let start = format!("{name}.");
        self.settings.retain(|path, _| path != name && !path.starts_with(&start));
        self.settings.len() < before
    }

    /// Sets the value of a setting, without taking it.
    pub(super) fn set(&mut self, name: &str, value: Value) {
        self.settings.insert(name.into(), value);
    }

    /// Replaces a setting by the settings of an object under the same name. Settings that the file
    /// states itself stay.
    pub(super) fn replace_by_section(&mut self, name: &str, section: Value) {
        self.settings.remove(name);
        let mut inside = BTreeMap::new();
        flatten(name.into(), section, &mut inside);
        for (path, value) in inside {
            self.settings.entry(path).or_insert(value);
        }
    }

    /// A name that does not change the costs, such as that of a model; `None` also if it is a
    /// script's variable.
    pub(super) fn name(&mut self, name: &str) -> Result<Option<String>, FrameworkError> {
        match self.take(name) {
            Some(Value::String(text)) if text.contains('$') => {
                self.account.without_effect.push(self.written(name));
                Ok(None)
            }
            _ => self.text(name),
        }
    }

    /// A list. The value of a flag is a list of words.
    pub(super) fn list(&mut self, name: &str) -> Result<Vec<Value>, FrameworkError> {
        match self.take(name) {
            None => Ok(Vec::new()),
            Some(Value::Array(list)) => Ok(list),
            Some(word @ Value::String(_)) => Ok(vec![word]),
            Some(_) => Err(self.wrong(name, "a list")),
        }
    }

    /// The settings with a name. A name that ends with `*` matches all that start with the rest.
    fn matching(&self, name: &str) -> Vec<String> {
        let is_meant = |path: &&String| match name.strip_suffix('*') {
            Some(start) => path.starts_with(start),
            None => *path == name,
        };
        self.settings.keys().filter(is_meant).cloned().collect()
    }

    /// The stated settings with these names that are not switched off; names as in
    /// [`Self::matching`].
    pub(super) fn stated_of(&self, names: &[&str]) -> Vec<String> {
        let found = names.iter().flat_map(|name| self.matching(name));
        found.filter(|path| self.settings.get(path).is_some_and(|value| !is_off(value))).collect()
    }

    /// Whether the file leaves any setting to its caller (`"auto"`).
    pub(super) fn leaves_open(&self) -> bool {
        self.settings.values().any(|value| value == "auto")
    }

    /// Takes settings that change neither the time of a step nor its memory. A name that ends with
    /// `*` matches all that start with the rest.
    pub(super) fn neutral(&mut self, names: &[&str]) {
        for name in names {
            let found: Vec<String> = self.matching(name).into_iter().filter(|path| !self.taken.contains(path)).collect();
            for path in found {
                self.account.without_effect.push(self.written(&path));
                self.taken.insert(path);
            }
        }
    }

    /// Takes settings that are switched on and change only when work is done, and notes them.
    pub(super) fn noted(&mut self, names: &[&str]) {
        for name in names {
            if self.settings.get(*name).is_some_and(|value| !is_off(value)) && self.taken.insert((*name).into()) {
                self.in_part(name);
            }
        }
    }

    /// Takes a setting if it has its default.
    pub(super) fn usual(&mut self, name: &str, default: &Value) {
        let is_same = |value: &&Value| *value == default || (value.is_number() && value.as_f64() == default.as_f64());
        if self.settings.get(name).filter(is_same).is_some() && self.taken.insert(name.into()) {
            self.account.without_effect.push(self.written(name));
        }
    }

    /// Notes a value that the file leaves open, with its source.
    pub(super) fn assume(&mut self, sentence: impl Into<String>) {
        self.account.assumed.push(sentence.into());
    }

    /// Notes that a setting packs samples. Their lengths decide the cost of attention.
    pub(super) fn assume_packed(&mut self, name: &str) {
        self.assume(format!(
            "{}: rows are full, and attention is over whole rows; where it keeps to samples, `workload: {{packed: TOKENS}}` says how \
             long these are in the mean, and `simulate --lengths` compares ways to make batches",
            self.written(name)
        ));
    }

    /// Notes a setting that a plan expresses only in part.
    pub(super) fn in_part(&mut self, name: &str) {
        let written = self.plain(name);
        self.account.unread.push(written);
    }

    /// The name of a setting in the file.
    pub(super) fn own_name(&self, name: &str) -> String {
        format!("{}{}", self.prefix, self.written_as.get(name).map_or(name, String::as_str))
    }

    /// A setting as the file writes it, in backticks.
    pub(super) fn written(&self, name: &str) -> String {
        format!("`{}`", self.plain(name))
    }

    fn plain(&self, name: &str) -> String {
        let Self { prefix, notation, .. } = self;
        let value = self.settings.get(name);
        let name = self.written_as.get(name).map_or(name, String::as_str);
        match (notation, value) {
            (Notation::Flags, None | Some(Value::Bool(true))) => format!("--{name}"),
            (Notation::Flags, Some(Value::Array(words))) => {
                let words: Vec<&str> = words.iter().filter_map(Value::as_str).collect();
                format!("--{name} {}", words.join(" "))
            }
            (Notation::Flags, Some(Value::String(text))) => format!("--{name} {text}"),
            (Notation::Flags, Some(value)) => format!("--{name} {value}"),
            (Notation::Toml, Some(value)) => format!("{prefix}{name} = {value}"),
            (Notation::Json, Some(value)) => format!("{prefix}{name}: {value}"),
            (_, None) => format!("{prefix}{name}"),
        }
    }

    /// Accounts for every setting that was not taken.
    ///
    /// # Errors
    /// If one of them decides what is planned.
    pub(super) fn finish(mut self) -> Result<Account, FrameworkError> {
        let rest: Vec<String> = self.settings.keys().filter(|path| !self.taken.contains(*path)).cloned().collect();
        for path in rest {
            let value = self.settings.get(&path).cloned().expect("invariant: the path is that of a setting");
            if is_off(&value) {
                self.account.without_effect.push(self.written(&path));
            } else if may_decide(&path) {
                let reason = format!(
                    "{} is not read, and it may decide model, layout, precision, optimizer or memory",
                    self.written(&path)
                );
                let hint = "leave it out of the file to plan the job without it".into();
                return Err(FrameworkError::Form { reason, hint });
            } else {
                self.in_part(&path);
            }
        }
        Ok(self.account)
    }
}

/// Whether a word is an unexpanded variable or the unexpanded output of a command. It could be any
/// number of words.
pub(super) fn is_variable(word: &str) -> bool {
    let Some(rest) = word.strip_prefix('$') else { return false };
    let is_name = |letter: char| letter.is_ascii_alphanumeric() || matches!(letter, '_' | '$');
    let is_sum = rest.starts_with("((");
    let is_closed = !is_sum && ((rest.starts_with('{') && rest.ends_with('}')) || (rest.starts_with('(') && rest.ends_with(')')));
    is_closed || (!rest.is_empty() && rest.chars().all(is_name))
}
