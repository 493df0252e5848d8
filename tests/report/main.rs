//! The pages that the program writes, in real headless Chromium: light and dark, wide and 390
//! pixels narrow. Without Chromium a test says so in one line and passes.
#![allow(clippy::panic, reason = "a test that fails may panic")]

mod browser;
#[path = "../common/mod.rs"]
mod common;
mod planner;

use browser::Browser;
use common::{Scratch, text};
use serde_json::{Value, json};
use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

const PLAN: &str = "model: {family: mlp, widths: [64, 128, 128, 10]}\ntopology: local\nglobal_batch: 32\n\
    layout: {data: 1, pipeline: 2, micro_batch: 16}\n";

/// The smallest text that a page may have, in CSS pixels.
const LEAST_TEXT: f64 = 11.0;

fn browser(test: &str) -> Option<Browser> {
    let browser = Browser::start();
    if browser.is_none() {
        let _ = writeln!(std::io::stderr(), "skipped: {test}: Chromium cannot be started (Debian's chromium; FORETELL_CHROMIUM)");
    }
    browser
}

/// A page of each kind: of a search, of a simulation, of a run.
fn pages(scratch: &Scratch) -> Vec<PathBuf> {
    let plan = scratch.file("plan.yaml", PLAN);
    let simulated = scratch.run(&["simulate", "--plan", text(&plan), "--oversubscribe", "--report", "simulated.html"]);
    let search = ["plan", "--model", "resnet50", "--topology", "dgx-a100-80g", "--fix", "tensor=1", "--report", "planned.html"];
    let planned = scratch.run(&[&search[..], &["-o", "chosen.yaml"]].concat());
    let run = ["--steps", "4", "--oversubscribe", "--no-evaluation", "--run", "run"];
    let trained = scratch.run(&[&["execute", "--plan", text(&plan)][..], &run].concat());
    let checked = scratch.run(&["check", "run"]);
    for output in [simulated, planned, trained, checked] {
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
    ["simulated.html", "planned.html", "run/report.html"].map(|name| scratch.path(name)).to_vec()
}

/// Notes the smallest text that scripts draw, before any script of the page runs.
const WATCH: &str = "
    window.smallestDrawn = Infinity;
    const draw = CanvasRenderingContext2D.prototype.fillText;
    CanvasRenderingContext2D.prototype.fillText = function (...all) {
        const size = parseFloat(/([\\d.]+)px/.exec(this.font)[1]) / devicePixelRatio;
        if (all[0]) window.smallestDrawn = Math.min(window.smallestDrawn, size);
        return draw.apply(this, all);
    };";

/// The smallest text of elements and of canvases, what is missing, and the colours.
const LOOK: &str = "(() => {
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    let smallest = Infinity;
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        const isShown = element.getClientRects().length && !['SCRIPT', 'STYLE', 'NOSCRIPT'].includes(element.tagName);
        if (isShown && walker.currentNode.data.trim()) smallest = Math.min(smallest, parseFloat(getComputedStyle(element).fontSize));
    }
    const charts = [...document.querySelectorAll('.chart')];
    const light = (color) => {
        const parts = color.match(/[\\d.]+/g).slice(0, 3).map((part) => part / 255)
            .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
        return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
    };
    const style = getComputedStyle(document.body);
    return {
        smallest, drawn: window.smallestDrawn, charts: charts.length,
        undrawn: charts.filter((chart) => ![...chart.childNodes].some((one) => one.nodeName !== 'NOSCRIPT' && one.textContent.trim())).length,
        canvases: document.querySelectorAll('.chart canvas').length,
        clipped: [...document.querySelectorAll('.chart canvas')].filter((one) =>
            one.getBoundingClientRect().right > one.closest('.plot').getBoundingClientRect().right + 1).length,
        wider: document.documentElement.scrollWidth - document.documentElement.clientWidth, width: innerWidth,
        paper: light(style.backgroundColor), ink: light(style.color),
    };
})()";

/// What is wrong with a page, a sentence each.
fn faults(browser: &mut Browser, page: &Path, width: u32, scheme: &str) -> Vec<String> {
    faults_at(browser, &format!("file://{}", page.display()), width, scheme)
}

fn faults_at(browser: &mut Browser, page: &str, width: u32, scheme: &str) -> Vec<String> {
    let metrics = json!({"width": width, "height": 900, "deviceScaleFactor": 2, "mobile": width < 500});
    browser.call("Emulation.setDeviceMetricsOverride", metrics);
    let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
    browser.call("Emulation.setEmulatedMedia", features);
    browser.visit(page);
    let look = browser.evaluate(LOOK);
    let number = |name: &str| look[name].as_f64().unwrap_or(f64::INFINITY);
    let mut faults = Vec::new();
    let mut fault = |is_wrong: bool, what: String| {
        if is_wrong {
            faults.push(what);
        }
    };
    fault(number("width") != f64::from(width), format!("it is {} pixels wide", number("width")));
    fault(number("charts") < 1.0 || number("canvases") < 1.0, "it has no chart".into());
    fault(number("undrawn") > 0.0, format!("{} charts are not drawn", number("undrawn")));
    fault(number("clipped") > 0.0, format!("{} charts are cut off", number("clipped")));
    fault(number("smallest") < LEAST_TEXT, format!("text of {} pixels", number("smallest")));
    fault(number("drawn") < LEAST_TEXT, format!("drawn text of {} pixels", number("drawn")));
    fault(number("wider") > 0.0, format!("it is {} pixels wider than the screen", number("wider")));
    let [paper, ink] = [number("paper"), number("ink")];
    let contrast = (paper.max(ink) + 0.05) / (paper.min(ink) + 0.05);
    fault((scheme == "dark") != (paper < ink), format!("it is not {scheme}"));
    fault(contrast < 7.0, format!("a contrast of {contrast}"));
    for event in browser.take_events() {
        let parameters = &event["params"];
        match event["method"].as_str().unwrap_or_default() {
            "Network.requestWillBeSent" => {
                let url = parameters["request"]["url"].as_str().unwrap_or_default();
                let is_own = url == page || url.starts_with("data:");
                fault(!is_own, format!("it asks for {url}"));
            }
            "Runtime.exceptionThrown" => fault(true, format!("an error: {}", parameters["exceptionDetails"])),
            "Log.entryAdded" => {
                fault(parameters["entry"]["level"] == "error", format!("it logs {}", parameters["entry"]["text"]))
            }
            _ => {}
        }
    }
    faults
}

#[test]
fn pages_are_sound_in_light_and_dark_and_at_390_pixels() {
    let Some(mut browser) = browser("pages") else { return };
    browser.call("Page.addScriptToEvaluateOnNewDocument", json!({"source": WATCH}));
    let scratch = Scratch::new();
    for page in pages(&scratch) {
        for (width, scheme) in [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")] {
            let faults = faults(&mut browser, &page, width, scheme);
            assert!(faults.is_empty(), "{} at {width} pixels, {scheme}: {faults:?}", page.display());
        }
    }
}

#[test]
fn a_broken_page_is_found_out() {
    let Some(mut browser) = browser("broken pages") else { return };
    browser.call("Page.addScriptToEvaluateOnNewDocument", json!({"source": WATCH}));
    let scratch = Scratch::new();
    let plan = scratch.file("plan.yaml", PLAN);
    let output = scratch.run(&["simulate", "--plan", text(&plan), "--oversubscribe", "--report", "page.html"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let html = std::fs::read_to_string(scratch.path("page.html")).expect("a page");
    let without_policy = html.replace("http-equiv=\"Content-Security-Policy\"", "name=\"policy\"");
    let image = "<img src=\"http://127.0.0.1:9/picture.png\"></body>";
    let broken = [
        (html.replace("</style>", "small, figcaption { font-size: 9px }</style>"), "text of 9 pixels"),
        (html.replace("</style>", "main { width: 700px }</style>"), "wider than the screen"),
        (html.replace("</style>", "body { background: white; color: #777 }</style>"), "a contrast of"),
        (without_policy.replace("12.5 * ratio", "9.7 * ratio"), "drawn text of 9.7 pixels"),
        (without_policy.replace("</body>", image), "it asks for http://127.0.0.1:9/picture.png"),
        (html.replace("</body>", image), "it logs"),
        (html.replace("12.5 * ratio", "12.6 * ratio"), "charts are not drawn"),
        (without_policy.replace("\"use strict\";", "\"use strict\"; undefined.chart;"), "an error"),
    ];
    for (number, (html, expected)) in broken.iter().enumerate() {
        let page = scratch.file(&format!("{number}.html"), html);
        let faults = faults(&mut browser, &page, 390, "light");
        assert!(faults.iter().any(|fault| fault.contains(expected)), "{expected}: {faults:?}");
    }
}

/// Presses Tab until an element of this kind has the focus. Returns whether one did.
fn tab_to(browser: &mut Browser, selector: &str) -> bool {
    (0..60).any(|_| {
        browser.press("Tab");
        browser.evaluate(&format!("document.activeElement.matches('{selector}')")) == true
    })
}

#[test]
fn a_keyboard_reaches_and_moves_every_chart() {
    let Some(mut browser) = browser("keyboard") else { return };
    let scratch = Scratch::new();
    let pages = pages(&scratch);
    browser.call(
        "Emulation.setDeviceMetricsOverride",
        json!({"width": 1280, "height": 900, "deviceScaleFactor": 1, "mobile": false}),
    );

    // The timeline of a run zooms, moves, goes back, and reads instructions.
    browser.open(&pages[2]);
    assert!(tab_to(&mut browser, ".plot"), "no chart takes the focus");
    let outline = browser.evaluate("getComputedStyle(document.activeElement).outlineStyle");
    assert_eq!(outline, "solid", "the focus is seen");
    let picture = |browser: &mut Browser| {
        browser.settle();
        browser.evaluate("document.activeElement.querySelector('canvas').toDataURL()")
    };
    let whole = picture(&mut browser);
    browser.press("+");
    let zoomed = picture(&mut browser);
    browser.press("ArrowLeft");
    let moved = picture(&mut browser);
    browser.press("0");
    assert!(whole != zoomed && zoomed != moved && picture(&mut browser) == whole);
    browser.press("ArrowDown");
    browser.press(".");
    browser.settle();
    let said = browser.evaluate("document.querySelector('.says').textContent");
    assert!(said.as_str().is_some_and(|said| said.contains("% of the step")), "{said}");

    // Every control takes the focus, and Enter chooses another layout of a search.
    for page in &pages {
        browser.open(page);
        let controls = "document.querySelectorAll('button, select, input, .plot')";
        browser.evaluate(&format!("{controls}.forEach((one) => one.addEventListener('focus', () => one.dataset.reached = 1))"));
        for _ in 0..120 {
            browser.press("Tab");
        }
        let left = browser
            .evaluate(&format!("[...{controls}].filter((one) => !one.dataset.reached).map((one) => one.outerHTML.slice(0, 80))"));
        assert_eq!(left, json!([]), "{}", page.display());
    }
    browser.open(&pages[1]);
    assert!(tab_to(&mut browser, ".rows button[aria-pressed=false]"), "no layout takes the focus");
    browser.press("Enter");
    assert_eq!(browser.evaluate("document.activeElement.getAttribute('aria-pressed')"), Value::from("true"));
}

/// A server of a run or the planner, and its address. It ends with the value.
struct Server(Child);

impl Server {
    fn start(scratch: &Scratch, arguments: &[&str]) -> (Self, String) {
        let mut command = scratch.command(&[&["serve", "--json"], arguments].concat());
        let mut child = command.stdout(Stdio::piped()).spawn().expect("the program starts");
        let output = BufReader::new(child.stdout.take().expect("a pipe"));
        let document: Value =
            serde_json::Deserializer::from_reader(output).into_iter().next().expect("a document").expect("JSON");
        (Self(child), document["url"].as_str().expect("an address").to_owned())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_served_run_is_shown_and_follows_its_steps() {
    let Some(mut browser) = browser("serve") else { return };
    browser.call("Page.addScriptToEvaluateOnNewDocument", json!({"source": WATCH}));
    let scratch = Scratch::new();
    let plan = scratch.file("plan.yaml", PLAN);
    let run = ["--steps", "4", "--oversubscribe", "--no-evaluation", "--run", "run"];
    let trained = scratch.run(&[&["execute", "--plan", text(&plan)][..], &run].concat());
    assert!(trained.status.success(), "{}", String::from_utf8_lossy(&trained.stderr));
    let (server, url) = Server::start(&scratch, &["run"]);
    for (width, scheme) in [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")] {
        let faults = faults_at(&mut browser, &url, width, scheme);
        assert!(faults.is_empty(), "at {width} pixels, {scheme}: {faults:?}");
    }
    // Without the token nothing is shown.
    browser.visit(url.split('?').next().expect("a first part"));
    assert!(browser.text().contains("with its token"), "{}", browser.text());
    drop(server);

    // A run without a result goes on. The page follows it by itself.
    std::fs::remove_file(scratch.path("run/measured.json")).expect("it is there");
    let (_server, url) = Server::start(&scratch, &["run"]);
    browser.visit(&url);
    let metrics = scratch.path("run/metrics.jsonl");
    let lines = std::fs::read_to_string(&metrics).expect("it is read");
    let last: Value = serde_json::from_str(lines.lines().last().expect("a line")).expect("JSON");
    let mut next = last.clone();
    (next["step"], next["loss"]) = (json!(last["step"].as_u64().expect("a step") + 1), json!(1.2345));
    std::fs::write(&metrics, format!("{lines}{next}\n")).expect("it is written");
    let end = Instant::now() + Duration::from_secs(60);
    while !browser.text().contains("1.2345") {
        assert!(Instant::now() < end, "the page does not follow: {}", browser.text());
        std::thread::sleep(Duration::from_millis(100));
    }
}
