//! Runs many cases in one test and lists all that fail.
//!
//! On a GPU one illegal address fails everything that follows in the process. There a case runs in
//! a child process, which is this test binary with the same test. A child runs cases until one
//! fails; the next child starts with the case after it.

use std::any::Any;
use std::fmt::Debug;
use std::io::{BufRead as _, BufReader};
use std::panic::AssertUnwindSafe;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

/// Environment variable of a child process: the index of its first case.
const FIRST_CASE: &str = "FORETELL_TEST_FIRST_CASE";
/// Environment variable that chooses cases: words, separated by commas, one of which a case's text
/// has. All cases if it is unset. `tests/gpu.sh` looks for races in some kernels only.
const CASES: &str = "FORETELL_TEST_CASES";
/// The longest that a case may take. The first one of a process may compile kernels.
const MAX_CASE: Duration = Duration::from_secs(180);
/// Marks a child's results on its standard output.
const MARK: &str = "foretell-case";

/// Where cases run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Isolation {
    /// In the test's own process.
    None,
    /// In child processes, each until a case fails.
    Processes,
}

/// Expands to the enclosing test's path in the crate, as the test binary's `--exact` takes it.
macro_rules! test_path {
    () => {{
        fn marker() {}
        let path = std::any::type_name_of_val(&marker).trim_end_matches("::marker");
        path.split_once("::").map_or(path, |(_, path)| path)
    }};
}
pub(super) use test_path;

/// Runs `check` on every case; it panics to report a failure.
///
/// # Panics
/// With a list of all cases that failed, if any did.
pub(super) fn check_each<C: Debug>(isolation: Isolation, test: &str, cases: &[C], mut check: impl FnMut(usize, &C)) {
    let words = std::env::var(CASES).unwrap_or_default();
    let cases = &chosen(&words, cases)[..];
    if cases.is_empty() && !words.is_empty() {
        // `tests/gpu/run.py` does not count the test as passed.
        println!("{test} chose no case");
        return;
    }
    let failures = failures(isolation, test, cases, |index, case: &&C| check(index, case));
    let listed: Vec<String> =
        failures.iter().map(|(index, failure)| format!("{index}: {:?}: {failure}", cases[*index])).collect();
    assert!(failures.is_empty(), "{} of {} cases failed:\n{}", failures.len(), cases.len(), listed.join("\n"));
}

/// Returns the cases whose text has one of the words.
fn chosen<'a, C: Debug>(words: &str, cases: &'a [C]) -> Vec<&'a C> {
    let is_chosen = |case: &&C| words.is_empty() || words.split(',').any(|word| format!("{case:?}").contains(word));
    cases.iter().filter(is_chosen).collect()
}

/// Returns the cases that failed, each with its first line of explanation.
fn failures<C>(isolation: Isolation, test: &str, cases: &[C], check: impl FnMut(usize, &C)) -> Vec<(usize, String)> {
    match std::env::var(FIRST_CASE) {
        Ok(first) => run_as_child(first.parse().unwrap(), cases, check),
        Err(_) if isolation == Isolation::Processes => run_children(test, cases.len()),
        Err(_) => run_here(cases, check),
    }
}

fn run_here<C>(cases: &[C], mut check: impl FnMut(usize, &C)) -> Vec<(usize, String)> {
    let outcome = |(index, case)| Some((index, check_one(&mut check, index, case).err()?));
    cases.iter().enumerate().filter_map(outcome).collect()
}

fn check_one<C>(check: &mut impl FnMut(usize, &C), index: usize, case: &C) -> Result<(), String> {
    let message = |panic: Box<dyn Any + Send>| {
        let text = panic.downcast_ref::<String>().cloned().or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        text.unwrap_or_default().lines().next().unwrap_or_default().to_owned()
    };
    std::panic::catch_unwind(AssertUnwindSafe(|| check(index, case))).map_err(message)
}

/// Runs cases from `first` until one fails, prints each result at once, and ends the process.
fn run_as_child<C>(first: usize, cases: &[C], mut check: impl FnMut(usize, &C)) -> ! {
    for (index, case) in cases.iter().enumerate().skip(first) {
        match check_one(&mut check, index, case) {
            Ok(()) => println!("{MARK} {index} passed"),
            Err(failure) => {
                println!("{MARK} {index} failed {failure}");
                std::process::exit(1);
            }
        }
    }
    println!("{MARK} {} end", cases.len());
    std::process::exit(0);
}

/// Runs all cases of a test in child processes, and returns those that failed.
fn run_children(test: &str, count: usize) -> Vec<(usize, String)> {
    let (mut failures, mut next) = (Vec::new(), 0);
    while next < count {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([test, "--exact", "--nocapture", "--test-threads", "1"])
            .env(FIRST_CASE, next.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (send, lines) = mpsc::channel();
        let output = child.stdout.take().unwrap();
        std::thread::spawn(move || BufReader::new(output).lines().map_while(Result::ok).try_for_each(|line| send.send(line)));
        // Why the case `next` failed, once the child has ended or is stopped.
        let failure = loop {
            let line = match lines.recv_timeout(MAX_CASE) {
                Ok(line) => line,
                Err(mpsc::RecvTimeoutError::Disconnected) => break format!("the process ended with {}", child.wait().unwrap()),
                Err(mpsc::RecvTimeoutError::Timeout) => break format!("no result after {MAX_CASE:?}"),
            };
            // The test harness may have begun the line.
            let Some((_, result)) = line.split_once(MARK) else { continue };
            println!("{test}{result}");
            match result.trim_start().split_once(' ').map(|(_, outcome)| outcome) {
                Some("passed") => next += 1,
                Some("end") => break String::new(),
                outcome => break outcome.and_then(|outcome| outcome.strip_prefix("failed ")).unwrap_or_default().into(),
            }
        };
        let _ = child.kill();
        let _ = child.wait();
        if next < count {
            failures.push((next, failure));
            next += 1;
        }
    }
    failures
}

#[test]
fn every_failing_case_is_found_although_some_end_their_process() {
    let cases = [0, 1, 2, 3, 4, 5];
    let check = |_: usize, case: &i32| match case {
        1 => assert_eq!(*case, 0, "this one is wrong\nand says more"),
        3 => std::process::abort(),
        5 => std::process::exit(0),
        _ => {}
    };
    let found = failures(Isolation::Processes, test_path!(), &cases, check);
    let indices: Vec<usize> = found.iter().map(|(index, _)| *index).collect();
    assert_eq!(indices, [1, 3, 5], "{found:?}");
    assert!(found[0].1.ends_with("this one is wrong"), "{found:?}");
    assert!(found[1].1.contains("signal"), "{found:?}");
}

#[test]
fn cases_in_one_process_are_all_run_and_listed() {
    let check = |_: usize, case: &i32| assert!(case % 2 == 0, "{case} is odd");
    assert_eq!(failures(Isolation::None, "", &[1, 2, 3], check), [(0, "1 is odd".into()), (2, "3 is odd".into())]);
}

#[test]
fn cases_are_chosen_by_words_of_their_text() {
    let cases = ["AttentionForward", "Sum", "Copy"];
    assert_eq!(chosen("Attention,Sum", &cases), [&"AttentionForward", &"Sum"]);
    assert_eq!(chosen("", &cases).len(), 3);
    assert!(chosen("Other", &cases).is_empty());
}
