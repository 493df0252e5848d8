//! The server of the planner's page.

use crate::common::Scratch;
use crate::http::Planner;
use crate::{children, long_search, timeless, wait_until};
use serde_json::{Value, json};
use std::io::BufReader;
use std::process::Stdio;
use std::time::{Duration, Instant};

const PLAN: [&str; 5] = ["plan", "--model", "gpt2", "--topology", "dgx-a100-80g"];

fn small_search() -> Value {
    json!({"command": "plan", "options": {"model": "gpt2", "topology": "dgx-a100-80g"}})
}

#[test]
fn an_answer_is_the_document_of_the_command_line() {
    let scratch = Scratch::new();
    let planner = Planner::start(&scratch, &[]);
    let reply = planner.ask("a", &small_search());
    assert_eq!(reply.status, 200, "{}", reply.body);
    let answered = reply.json();
    assert_eq!(
        (&answered["status"], &answered["line"]),
        (&json!(0), &json!("foretell plan --model gpt2 --topology dgx-a100-80g"))
    );
    assert_eq!(timeless(answered["answer"].clone()), timeless(scratch.json(&PLAN)));

    // The plan of the answer is simulated, with a report that is kept.
    let options = json!({"plan": answered["answer"]["plan"], "tokens": 1e9});
    let reply = planner.ask("a", &json!({"command": "simulate", "options": options, "report": true}));
    let simulated = reply.json();
    scratch.file("plan.json", &answered["answer"]["plan"].to_string());
    let expected = scratch.json(&["simulate", "--plan", "plan.json", "--tokens", "1e9"]);
    assert_eq!(timeless(simulated["answer"].clone()), timeless(expected));
    let report = planner.request("GET", &format!("/report?number={}", simulated["report"]), "");
    assert!(report.status == 200 && report.head.contains("sandbox allow-scripts"), "{}", report.head);
    assert!(report.body.starts_with("<!DOCTYPE html>") && report.body.contains("Timeline"));
    assert_eq!(planner.request("GET", "/report?number=999", "").status, 404);

    // The files of a framework come with the answer.
    let options = json!({"plan": answered["answer"]["plan"], "to": "deepspeed"});
    let exported = planner.ask("a", &json!({"command": "export", "options": options})).json();
    let names: Vec<&String> = exported["files"].as_object().expect("files").keys().collect();
    assert!(names.iter().any(|name| name.ends_with(".json")) && exported["answer"]["command"].is_string(), "{names:?}");
    assert!(children(planner.process()).is_empty(), "no process is left");
}

#[test]
fn an_optimizer_kernels_adapters_and_a_fixed_layout_are_asked_for() {
    let scratch = Scratch::new();
    let planner = Planner::start(&scratch, &[]);
    let choices = [
        ("method", "lora"),
        ("adapter", "rank=8,targets=attention"),
        ("base-bits", "4"),
        ("loss", "plain"),
        ("attention", "sdpa"),
        ("optimizer", "adamw-8bit"),
        ("headroom", "10%"),
        ("fix", "recompute=full,micro_batch=1"),
    ];
    let mut question = small_search();
    let options = question["options"].as_object_mut().expect("options");
    options.extend(choices.iter().map(|&(name, value)| (name.to_owned(), json!(value))));
    let answered = planner.ask("a", &question).json();
    let words: Vec<String> = choices.iter().flat_map(|(name, value)| [format!("--{name}"), (*value).to_owned()]).collect();
    let words: Vec<&str> = PLAN.into_iter().chain(words.iter().map(String::as_str)).collect();
    assert_eq!(timeless(answered["answer"].clone()), timeless(scratch.json(&words)));
    for (name, value) in choices {
        let word = format!(" --{name} {value}");
        assert!(answered["line"].as_str().is_some_and(|line| line.contains(&word)), "{word}: {}", answered["line"]);
    }
    assert_eq!(answered["answer"]["plan"]["layout"]["recompute"], "full", "{answered}");
}

#[test]
fn uploaded_files_are_read_and_stand_in_the_plan() {
    let scratch = Scratch::new();
    let planner = Planner::start(&scratch, &[]);
    let model = "family: gpt\nlayers: 2\nhidden: 64\nheads: 2\nvocab: 100\nsequence: 64\n";
    let topology = "base: dgx-a100-80g\nnodes: 2\n";
    let options = json!({"model": {"name": "tiny.yaml", "text": model}, "topology": topology, "global-batch": 32});
    let found = planner.ask("a", &json!({"command": "plan", "options": options})).json();
    let plan = &found["answer"]["plan"];
    assert_eq!((&plan["model"]["hidden"], &plan["topology"]["base"]), (&json!(64), &json!("dgx-a100-80g")), "{found}");
    let step = planner.ask("a", &json!({"command": "simulate", "options": {"plan": plan}})).json();
    assert_eq!(step["answer"]["step_seconds"], found["answer"]["predicted"]["step_seconds"], "{step}");
    // A mistake is said with the name of the file.
    let options = json!({"model": {"name": "tiny.yaml", "text": "family: gpt\nlayers: [\n"}, "topology": "8xh100"});
    let wrong = planner.ask("a", &json!({"command": "plan", "options": options})).json();
    assert!(wrong["status"] == 2 && wrong["message"].as_str().is_some_and(|text| text.contains("model/tiny.yaml")), "{wrong}");
}

#[test]
fn only_the_own_page_with_the_token_may_ask() {
    let scratch = Scratch::new();
    let planner = Planner::start(&scratch, &[]);
    let (host, token) = (&planner.host, &planner.token);
    let question = small_search().to_string();
    let post = |path: &str, headers: &str| {
        let length = question.len();
        planner
            .send(&format!(
                "POST {path} HTTP/1.1\r\n{headers}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{question}"
            ))
            .status
    };
    let path = format!("/ask?lane=a&token={token}");
    assert_eq!(post("/ask?lane=a", &format!("Host: {host}\r\nOrigin: http://{host}")), 403, "no token");
    assert_eq!(post("/ask?lane=a&token=0", &format!("Host: {host}\r\nOrigin: http://{host}")), 403, "another token");
    assert_eq!(post(&path, &format!("Host: evil.example\r\nOrigin: http://{host}")), 403, "another host");
    assert_eq!(post(&path, &format!("Host: {host}")), 403, "no origin");
    assert_eq!(post(&path, &format!("Host: {host}\r\nOrigin: http://evil.example")), 403, "another origin");
    assert_eq!(post(&path, &format!("Host: {host}\r\nOrigin: http://{host}\r\nSec-Fetch-Site: cross-site")), 403, "another site");
    assert_eq!(post(&path, &format!("Host: {host}\r\nOrigin: http://{host}")), 200);
    assert_eq!(planner.request("GET", "/ask?lane=a", "").status, 405);
    assert_eq!(planner.request("PUT", "/ask?lane=a", "").status, 405);
    assert_eq!(planner.request("POST", "/", "").status, 405);
    assert_eq!(planner.request("GET", "/../etc/passwd", "").status, 404);
    assert_eq!(planner.request("POST", "/ask?lane=a%2f", "{}").status, 400);
    assert_eq!(planner.request("POST", "/ask", "{}").status, 400);
    let page = planner.request("GET", "/", "");
    let policy = page.head.lines().find(|line| line.starts_with("Content-Security-Policy:")).expect("a policy");
    let nonce = policy.split("'nonce-").nth(1).and_then(|rest| rest.split('\'').next()).expect("a nonce");
    assert!(policy.contains("default-src 'none'") && policy.contains("frame-ancestors 'none'") && !policy.contains("unsafe"));
    assert_eq!(page.body.matches(&format!("nonce=\"{nonce}\"")).count(), 2, "one style and one script");
    assert!(!page.body.contains("{{") && !page.body.contains(" style=") && !page.body.contains("https://"));
    // The name of SVG's elements is an address, and the only one.
    assert_eq!(page.body.matches("http://").count(), page.body.matches("http://www.w3.org/2000/svg\"").count());
}

#[test]
fn hostile_questions_are_refused() {
    let scratch = Scratch::new();
    let planner = Planner::start(&scratch, &[]);
    let refused = [
        "",
        "{",
        "[]",
        "{\"command\": 3}",
        "{\"command\": \"plan\", \"shell\": \"x\"}",
        r#"{"command": "execute"}"#,
        r#"{"command": "plan", "options": {"output": "x"}}"#,
        r#"{"command": "plan", "options": {"model": "/etc/passwd"}}"#,
        r#"{"command": "plan", "options": {"model": {"name": "../x", "text": ""}}}"#,
        r#"{"command": "simulate", "options": {"plan": "x", "trace": "x"}}"#,
    ];
    for question in refused {
        let reply = planner.request("POST", "/ask?lane=a", question);
        assert!(reply.status == 400 && reply.code() == "input", "{question}: {} {}", reply.status, reply.body);
    }
    let reply = planner.request("POST", "/ask?lane=a", &" ".repeat((4 << 20) + 1));
    assert_eq!(reply.status, 413);

    // Files that an uploaded file names are not read either: the secret is valid, and yet unknown.
    let secret = scratch.file("secret.yaml", "family: gpt\nlayers: 2\nhidden: 64\nheads: 2\nvocab: 100\nsequence: 64\n");
    let secret = secret.display();
    let plans = [
        format!("{{model: '{secret}', topology: 8xh100, layout: {{data: 8}}, global_batch: 8, precision: bf16}}"),
        format!("{{model: gpt2, topology: '{secret}', layout: {{data: 8}}, global_batch: 8, precision: bf16}}"),
        "{model: ../../secret.yaml, topology: 8xh100, layout: {data: 8}, global_batch: 8, precision: bf16}".to_owned(),
    ];
    for plan in plans {
        let answered = planner.ask("a", &json!({"command": "simulate", "options": {"plan": plan}})).json();
        let message = answered["message"].as_str().unwrap_or_default();
        assert!(answered["status"] == 2 && message.contains("no other file is read"), "{plan}: {answered}");
    }
    let routing = planner
        .ask("a", &json!({"command": "plan", "options": {"model": "gpt2", "topology": "8xh100", "routing": "secret.yaml"}}));
    assert_eq!(routing.json()["status"], 2, "{}", routing.body);
}

#[test]
fn a_later_question_ends_the_one_before() {
    let scratch = Scratch::new();
    let planner = Planner::start(&scratch, &[]);
    std::thread::scope(|scope| {
        let first = scope.spawn(|| planner.ask("tab.1.search", &long_search()));
        wait_until("the search begins", || children(planner.process()).len() == 1);
        let before = children(planner.process());
        let started = Instant::now();
        let second = planner.ask("tab.1.search", &json!({"command": "models"}));
        assert!(second.status == 200 && started.elapsed() < Duration::from_secs(20));
        let first = first.join().expect("a reply");
        assert_eq!((first.status, first.code().as_str()), (409, "cancelled"));
        wait_until("the first search ends", || !children(planner.process()).contains(&before[0]));

        // Those of a tab are cancelled together.
        let waiting: Vec<_> = ["tab.2.search", "tab.2.step", "tab.2.fits"]
            .map(|lane| {
                scope.spawn({
                    let planner = &planner;
                    move || planner.ask(lane, &long_search())
                })
            })
            .into();
        wait_until("two work and one waits", || children(planner.process()).len() == 2);
        // The third may still be on its way when the first cancellation arrives.
        wait_until("all are cancelled", || {
            assert_eq!(planner.request("POST", "/cancel?lane=tab.", "").status, 200);
            waiting.iter().all(|reply| reply.is_finished())
        });
        for reply in waiting {
            assert_eq!(reply.join().expect("a reply").status, 409);
        }
        wait_until("no process is left", || children(planner.process()).is_empty());
    });
}

#[test]
fn a_search_says_how_far_it_is() {
    let scratch = Scratch::new();
    let planner = Planner::start(&scratch, &[]);
    std::thread::scope(|scope| {
        let mut question = long_search();
        question["progress"] = json!(true);
        let planner = &planner;
        let search = scope.spawn(move || planner.ask("tab.search", &question));
        wait_until("it reports", || planner.request("GET", "/progress?lane=tab.search", "").json().is_object());
        planner.request("POST", "/cancel?lane=tab", "");
        assert_eq!(search.join().expect("a reply").status, 409);
        assert!(planner.request("GET", "/progress?lane=tab.search", "").json().is_null());
    });
}

#[test]
fn time_and_memory_are_bounded() {
    let scratch = Scratch::new();
    let planner = Planner::start(&scratch, &["--answer-time", "1s"]);
    let started = Instant::now();
    let reply = planner.ask("a", &long_search());
    assert_eq!((reply.status, reply.code().as_str()), (504, "time"), "{}", reply.body);
    assert!(started.elapsed() < Duration::from_secs(20) && children(planner.process()).is_empty());
    let planner = Planner::start(&scratch, &["--answer-memory", "64MiB"]);
    let reply = planner.ask("a", &long_search());
    assert_eq!((reply.status, reply.code().as_str()), (500, "memory"), "{}", reply.body);
}

#[test]
fn answers_end_with_the_server() {
    let scratch = Scratch::new();
    let planner = Planner::start(&scratch, &[]);
    let (process, host, token) = (planner.process(), planner.host.clone(), planner.token.clone());
    let question = long_search().to_string();
    let mut stream = std::net::TcpStream::connect(&host).expect("it listens");
    let head = format!(
        "POST /ask?lane=a&token={token} HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\nContent-Length: {}\r\n\r\n",
        question.len()
    );
    std::io::Write::write_all(&mut stream, format!("{head}{question}").as_bytes()).expect("it is sent");
    wait_until("the search begins", || !children(process).is_empty());
    let search = children(process)[0];
    drop(planner);
    wait_until("the search ends", || !std::path::Path::new(&format!("/proc/{search}")).exists());
}

#[test]
fn a_signal_ends_the_server_and_leaves_no_file() {
    let scratch = Scratch::new();
    std::fs::create_dir(scratch.path("tmp")).expect("a folder");
    let mut planner = Planner::start_in(&scratch, &[], &scratch.path("tmp"));
    let files = || std::fs::read_dir(scratch.path("tmp")).expect("a folder").count();
    std::thread::scope(|scope| {
        let planner = &planner;
        let search = scope.spawn(move || planner.ask("a", &long_search()));
        wait_until("the search begins", || files() == 1 && !children(planner.process()).is_empty());
        planner.stop();
        assert_eq!(search.join().expect("a reply").status, 409);
    });
    assert!(planner.ended().success());
    assert_eq!(files(), 0);
}

#[test]
fn other_machines_reach_the_page_only_with_a_warning() {
    let scratch = Scratch::new();
    let warning = |host: &str| {
        let mut command = scratch.command(&["serve", "--json", "--host", host]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let document: Value =
            serde_json::Deserializer::from_reader(output).into_iter().next().expect("a document").expect("JSON");
        let mut planner = Planner::of(child, &document);
        // Each address of the machine is a name of this server.
        let port = planner.host.rsplit_once(':').expect("a port").1.to_owned();
        planner.host = format!("127.0.0.1:{port}");
        assert_eq!(planner.ask("a", &json!({"command": "models"})).status, 200);
        let named = planner
            .send(&format!("GET /?token={} HTTP/1.1\r\nHost: evil.example:{port}\r\nConnection: close\r\n\r\n", planner.token));
        assert_eq!(named.status, 403, "a page elsewhere may have its name lead here");
        planner.messages()
    };
    assert_eq!(warning("127.0.0.1"), "");
    let said = warning("0.0.0.0");
    assert!(said.starts_with("warning: other machines can reach this server") && said.lines().count() == 1, "{said}");
    let unknown = scratch.run(&["serve", "--host", "no such host"]);
    assert_eq!(unknown.status.code(), Some(2), "{}", String::from_utf8_lossy(&unknown.stderr));
}

#[test]
fn a_step_over_samples_of_different_lengths_has_its_own_days_and_price() {
    let scratch = Scratch::new();
    let planner = Planner::start(&scratch, &[]);
    let samples = json!({"lengths": "mean=256,p95=700", "batching": "pad"});
    let mut question = small_search();
    question["options"].as_object_mut().expect("options").extend(samples.as_object().expect("options").clone());
    let found = planner.ask("a", &question).json();
    let ways = found["answer"]["lengths"]["batching"].as_array().expect("the ways").len();
    assert_eq!((ways, &found["answer"]["lengths"]["batching"][0]["name"]), (3, &json!("pad")), "{found}");
    let mut options = json!({"plan": found["answer"]["plan"], "tokens": 1e9, "device-price": "$2"});
    options.as_object_mut().expect("options").extend(samples.as_object().expect("options").clone());
    let step = planner.ask("a", &json!({"command": "simulate", "options": options})).json()["answer"].take();
    let (run, way) = (&step["cost"]["run"], &step["lengths"]["batching"][0]);
    let number = |value: &Value| value.as_f64().expect("a number");
    let seconds = 1e9 / number(&way["tokens_per_second"]);
    assert!((number(&run["seconds"]) / seconds - 1.0).abs() < 1e-3, "{run} {way}");
    let price = number(&run["seconds"]) / 3600.0 * 8.0 * 2.0;
    assert!((number(&run["price"]) / price - 1.0).abs() < 1e-9 && step["cost"]["currency"] == "USD", "{step}");

    // A file has a number on each line.
    let file = json!({"name": "lengths.txt", "text": "100\n200\n300\n"});
    let options = json!({"model": "gpt2", "topology": "dgx-a100-80g", "lengths": file, "time-limit": "50ms"});
    let found = planner.ask("a", &json!({"command": "plan", "options": options})).json();
    assert_eq!(found["answer"]["lengths"]["longest_tokens"], 300, "{found}");
    assert_eq!(found["line"], "foretell plan --model gpt2 --topology dgx-a100-80g --lengths lengths.txt --time-limit 50ms");
}
