//! The planner's page: it answers as one types, and is sound, labelled and reachable by keyboard.

use crate::browser::Browser;
use crate::common::Scratch;
use crate::{LEAST_TEXT, Server, browser};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// A configuration whose search takes a moment.
const SMALL: &str = "model=gpt2&topology=4xa100-80g&batch=64";

/// Contrast of text that WCAG asks for, level AA.
const LEAST_CONTRAST: f64 = 4.5;

/// Text that is too small or too faint, controls without a name, and whether the page is too wide.
const LOOK: &str = "(() => {
    const parts = (color) => color.match(/[\\d.]+/g).map(Number);
    const light = (color) => {
        const [red, green, blue] = parts(color).slice(0, 3).map((part) => part / 255)
            .map((part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4));
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const paper = (element) => {
        for (let one = element; one; one = one.parentElement) {
            const color = getComputedStyle(one).backgroundColor;
            if (parts(color)[3] !== 0) return color;
        }
        return 'rgb(255, 255, 255)';
    };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    let smallest = Infinity;
    const faint = [];
    while (walker.nextNode()) {
        const element = walker.currentNode.parentElement;
        const text = walker.currentNode.data.trim();
        if (!text || !element.getClientRects().length || ['SCRIPT', 'STYLE', 'OPTION'].includes(element.tagName)) continue;
        const style = getComputedStyle(element);
        const scale = element.ownerSVGElement ? element.ownerSVGElement.clientWidth / element.ownerSVGElement.viewBox.baseVal.width : 1;
        smallest = Math.min(smallest, parseFloat(style.fontSize) * scale);
        const [ink, back] = [light(element.ownerSVGElement ? style.fill : style.color), light(paper(element))];
        const contrast = (Math.max(ink, back) + 0.05) / (Math.min(ink, back) + 0.05);
        if (contrast < LEAST_CONTRAST) faint.push(`${text.slice(0, 40)}: ${contrast.toFixed(2)}`);
    }
    const named = (one) => (one.labels && [...one.labels].some((label) => label.textContent.trim())) || one.getAttribute('aria-label')
        || (['BUTTON', 'A'].includes(one.tagName) && one.textContent.trim()) || one.title;
    const unnamed = [...document.querySelectorAll('input, select, button, a[href], iframe')].filter((one) => !named(one)).map((one) => one.outerHTML.slice(0, 80));
    const ids = [...document.querySelectorAll('[id]')].map((one) => one.id);
    return { smallest, faint, unnamed, twice: ids.filter((id, index) => ids.indexOf(id) !== index),
        wider: document.documentElement.scrollWidth - document.documentElement.clientWidth };
})()";

/// Opens a configuration, and waits for the end of its search and its simulation.
fn open(browser: &mut Browser, url: &str, configuration: &str) {
    browser.visit("about:blank");
    browser.visit(&format!("{url}#{configuration}"));
    wait(browser, "document.getElementById('state').textContent.startsWith('The search is over')");
    wait(browser, "/steps;/.test(document.getElementById('facts').textContent)");
}

#[track_caller]
fn wait(browser: &mut Browser, condition: &str) {
    let end = Instant::now() + Duration::from_secs(60);
    while browser.evaluate(condition) != true {
        assert!(Instant::now() < end, "{condition}: {}", browser.text());
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// What the page reported that it should not have.
fn complaints(browser: &mut Browser, url: &str) -> Vec<String> {
    let own = url.split("?token").next().unwrap_or_default();
    let events = browser.take_events();
    let found = events.iter().filter_map(|event| {
        let parameters = &event["params"];
        match event["method"].as_str()? {
            "Network.requestWillBeSent" => {
                let url = parameters["request"]["url"].as_str()?;
                let is_own = [own, "data:", "about:", "blob:"].iter().any(|start| url.starts_with(start));
                (!is_own).then(|| format!("it asks for {url}"))
            }
            "Runtime.exceptionThrown" => Some(format!("an error: {}", parameters["exceptionDetails"])),
            "Log.entryAdded" if parameters["entry"]["level"] == "error" => {
                Some(format!("it logs {}", parameters["entry"]["text"]))
            }
            _ => None,
        }
    });
    found.collect()
}

fn resize(browser: &mut Browser, width: u32, scheme: &str) {
    let metrics = json!({"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500});
    browser.call("Emulation.setDeviceMetricsOverride", metrics);
    let features = json!({"features": [{"name": "prefers-color-scheme", "value": scheme}]});
    browser.call("Emulation.setEmulatedMedia", features);
}

/// A script that drops a file onto a field.
fn dropped(field: &str, name: &str, text: &str) -> String {
    format!(
        "(() => {{ const data = new DataTransfer(); data.items.add(new File([{}], '{name}')); \
         document.getElementById('{field}').closest('.field').dispatchEvent(new DragEvent('drop', {{ dataTransfer: data, bubbles: true, cancelable: true }})); }})()",
        Value::from(text)
    )
}

#[test]
fn the_planner_is_sound_in_light_and_dark_and_at_390_pixels() {
    let Some(mut browser) = browser("planner") else { return };
    let scratch = Scratch::new();
    let (_server, url) = Server::start(&scratch, &[]);
    let look = LOOK.replace("LEAST_CONTRAST", &LEAST_CONTRAST.to_string());
    for (width, scheme) in [(1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")] {
        resize(&mut browser, width, scheme);
        open(&mut browser, &url, &format!("{SMALL}&method=lora&adapter=rank%3D8"));
        browser.evaluate("document.getElementById('more').open = true");
        browser.evaluate("document.getElementById('if-peak').value = '1'; document.getElementById('if-peak').dispatchEvent(new Event('input'))");
        wait(&mut browser, "document.querySelector('#if-curve svg') !== null");
        browser.settle();
        let look = browser.evaluate(&look);
        let at = format!("at {width} pixels, {scheme}: {look}");
        assert!(look["smallest"].as_f64().is_some_and(|size| size >= LEAST_TEXT), "{at}");
        assert_eq!((&look["faint"], &look["unnamed"], &look["twice"]), (&json!([]), &json!([]), &json!([])), "{at}");
        assert_eq!(look["wider"], 0, "{at}");
        assert_eq!(complaints(&mut browser, &url), [""; 0], "{at}");
    }
}

#[test]
fn the_planner_answers_as_one_types() {
    let Some(mut browser) = browser("planner, typing") else { return };
    let scratch = Scratch::new();
    let (_server, url) = Server::start(&scratch, &[]);
    resize(&mut browser, 1280, "light");
    open(&mut browser, &url, SMALL);
    let text = |browser: &mut Browser, id: &str| {
        browser.evaluate(&format!("document.getElementById('{id}').textContent")).as_str().unwrap_or_default().to_owned()
    };
    assert_eq!(
        text(&mut browser, "line"),
        "foretell plan --model gpt2 --topology 4xa100-80g --global-batch 64 --method pretrain"
    );
    let expected =
        scratch.json(&["plan", "--model", "gpt2", "--topology", "4xa100-80g", "--global-batch", "64", "--method", "pretrain"]);
    let step = expected["predicted"]["step_seconds"].as_f64().expect("a time");
    assert!(text(&mut browser, "facts").contains(&format!("{:.0} ms", step * 1e3)), "{}", text(&mut browser, "facts"));
    let rows = "document.querySelectorAll('#layouts tbody tr').length";
    assert_eq!(browser.evaluate(rows), json!(1 + expected["alternatives"].as_array().map_or(0, Vec::len)));

    // A key changes the question, the command and the address; another layout can be chosen.
    browser.evaluate("document.getElementById('batch').focus(); document.getElementById('batch').select()");
    for key in ["1", "2", "8"] {
        browser.press(key);
    }
    wait(
        &mut browser,
        "document.getElementById('line').textContent.includes('--global-batch 128') && location.hash.includes('batch=128')",
    );
    wait(&mut browser, "document.getElementById('state').textContent.startsWith('The search is over')");
    browser.evaluate("document.querySelectorAll('#layouts button')[1].focus()");
    browser.press("Enter");
    wait(
        &mut browser,
        "document.activeElement.getAttribute('aria-pressed') === 'true' && document.activeElement.textContent === '2'",
    );

    // A mistake is said with its hint, and the page stays.
    browser.evaluate("document.getElementById('model').focus(); document.getElementById('model').select()");
    for key in ["g", "t", "p", "2"] {
        browser.press(key);
    }
    wait(
        &mut browser,
        "!document.getElementById('problem').hidden && /gpt2/.test(document.getElementById('problem').textContent)",
    );
    assert!(text(&mut browser, "facts").contains("fit"));

    // The address alone brings a configuration back, and one that was kept beside it.
    open(&mut browser, &url, &format!("{SMALL}&method=lora&kept={}", SMALL.replace('=', "%3D").replace('&', "%26")));
    wait(&mut browser, "document.querySelectorAll('#beside tbody tr').length > 5");
    assert!(text(&mut browser, "beside").contains("pretrain") && text(&mut browser, "beside").contains("lora"));
    assert_eq!(browser.evaluate("document.getElementById('method').value"), "lora");
}

#[test]
fn the_panels_of_the_planner_answer() {
    let Some(mut browser) = browser("planner, panels") else { return };
    let scratch = Scratch::new();
    let (_server, url) = Server::start(&scratch, &[]);
    resize(&mut browser, 1280, "light");
    open(&mut browser, &url, SMALL);
    browser.evaluate("document.getElementById('report-show').click()");
    wait(&mut browser, "!document.getElementById('report').hidden && !document.getElementById('report-save').hidden");
    let report = browser.evaluate("fetch(document.getElementById('report').src).then((page) => page.text())");
    assert!(report.as_str().is_some_and(|page| page.contains("Timeline") && page.contains("Memory")));
    browser.evaluate("document.getElementById('scale-axis').value = 'batch'; document.getElementById('scale-ask').click()");
    wait(&mut browser, "document.querySelectorAll('#scale-curve circle').length === 5");
    browser.evaluate(
        "document.getElementById('fits-rows').value = 'batch'; document.getElementById('fits-columns').value = 'loss'; \
                      document.getElementById('fits-ask').click()",
    );
    wait(&mut browser, "document.querySelectorAll('#fits-table tbody td').length >= 6");
    browser.evaluate("document.getElementById('export-ask').click()");
    wait(&mut browser, "document.querySelectorAll('#export details').length >= 2");
    browser.evaluate("document.querySelectorAll('#export details').forEach((one) => { one.open = true; })");
    assert!(browser.text().contains("Save run.sh") && browser.text().contains("Copy run.sh"), "{}", browser.text());

    // After a change panels are of the configuration before, but for the curves, which follow.
    browser.evaluate(
        "document.getElementById('batch').value = '128'; document.getElementById('batch').dispatchEvent(new Event('input'))",
    );
    wait(&mut browser, "document.getElementById('fits-state').textContent === 'Of the configuration before.'");
    wait(
        &mut browser,
        "!document.querySelector('#scale-curve.old, #if-curve.old') && /128/.test(document.querySelector('#scale-curve svg').textContent)",
    );
    assert_eq!(browser.evaluate("document.querySelectorAll('#fits-table.old, #export.old').length"), 2);

    // A file of another tool is dropped in: a model, and a listing of GPUs.
    let config = r#"{"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 100, "n_positions": 64}"#;
    browser.evaluate(&dropped("model", "config.json", config));
    wait(&mut browser, "document.getElementById('line').textContent.includes('--model config.yaml')");
    let listing = "\tGPU0\tGPU1\tCPU Affinity\nGPU0\t X \tNV18\t0-31\nGPU1\tNV18\t X \t0-31\n";
    browser.evaluate(&dropped("topology", "topo.txt", listing));
    wait(&mut browser, "document.getElementById('line').textContent.includes('--topology imported.yaml')");
    wait(&mut browser, "document.getElementById('state').textContent.startsWith('The search is over')");
    assert_eq!(complaints(&mut browser, &url), [""; 0]);
}

#[test]
fn samples_of_different_lengths_and_a_price_have_fields() {
    let Some(mut browser) = browser("planner, lengths") else { return };
    let scratch = Scratch::new();
    let (_server, url) = Server::start(&scratch, &[]);
    resize(&mut browser, 1280, "light");
    open(&mut browser, &url, SMALL);
    assert_eq!(browser.evaluate("document.getElementById('batching-field').hidden"), true);
    browser.evaluate("document.getElementById('lengths').focus()");
    for key in "mean=256,p95=700".split("").filter(|key| !key.is_empty()) {
        browser.press(key);
    }
    wait(&mut browser, "document.getElementById('line').textContent.includes('--lengths mean=256,p95=700')");
    wait(&mut browser, "document.querySelectorAll('#lengths-table tbody tr').length === 3");
    browser.evaluate("document.getElementById('batching').value = 'pack'; document.getElementById('batching').dispatchEvent(new Event('input'))");
    wait(&mut browser, "document.querySelector('#lengths-table tbody td').textContent === 'pack'");
    wait(&mut browser, "document.getElementById('state').textContent.startsWith('The search is over')");
    wait(&mut browser, "/--lengths/.test(document.getElementById('step-line').textContent)");
    assert!(
        browser
            .evaluate("location.hash")
            .as_str()
            .is_some_and(|hash| hash.contains("lengths=") && hash.contains("batching=pack"))
    );

    // The price of a device-hour changes the run's price alone.
    browser.evaluate(
        "document.getElementById('price').value = '$2'; document.getElementById('price').dispatchEvent(new Event('input'))",
    );
    wait(&mut browser, "/[0-9] USD/.test(document.getElementById('facts').textContent)");

    // Factors of hardware stand in the address, too.
    browser.evaluate(
        "document.getElementById('if-peak').value = '1'; document.getElementById('if-peak').dispatchEvent(new Event('input'))",
    );
    wait(&mut browser, "location.hash.includes('hardware=peak*2')");
    let address = browser.evaluate("location.href").as_str().expect("an address").to_owned();
    browser.visit("about:blank");
    browser.visit(&address);
    wait(
        &mut browser,
        "document.getElementById('if-state').textContent.startsWith('Step ') && document.getElementById('if-peak').value === '1'",
    );
    assert_eq!(browser.evaluate("document.getElementById('price').value"), "$2");

    // A file takes the field's place, until it is removed.
    browser.evaluate(&dropped("lengths", "lengths.txt", "100\n200\n300\n"));
    wait(&mut browser, "document.getElementById('line').textContent.includes('--lengths lengths.txt')");
    wait(&mut browser, "/the longest 300/.test(document.getElementById('lengths-table').textContent)");
    browser.evaluate("document.getElementById('lengths-clear').click()");
    wait(&mut browser, "document.getElementById('line').textContent.includes('--lengths mean=256,p95=700')");
    assert_eq!(complaints(&mut browser, &url), [""; 0]);
}

/// A script that changes a field as a person does.
fn filled(field: &str, value: &str) -> String {
    format!(
        "(() => {{ const field = document.getElementById('{field}'); field.value = '{value}'; field.dispatchEvent(new Event('input')); }})()"
    )
}

#[test]
fn more_choices_stand_in_the_question_the_address_and_the_comparison() {
    let Some(mut browser) = browser("planner, more choices") else { return };
    let scratch = Scratch::new();
    let (_server, url) = Server::start(&scratch, &[]);
    resize(&mut browser, 1280, "light");
    open(&mut browser, &url, &format!("{SMALL}&method=lora"));
    browser.evaluate("document.getElementById('beside-keep').click()");

    // A keyboard opens the group and types into it.
    browser.evaluate("document.querySelector('#more summary').focus()");
    browser.press("Enter");
    assert_eq!(browser.evaluate("document.getElementById('more').open"), true);
    browser.evaluate("document.getElementById('adapter').focus()");
    for key in "rank=8,targets=attention".split("").filter(|key| !key.is_empty()) {
        browser.press(key);
    }
    let choices =
        [("optimizer", "adamw-8bit"), ("fix", "recompute=full,micro_batch=1"), ("headroom", "10%"), ("loss", "chunked")];
    for (field, value) in choices {
        browser.evaluate(&filled(field, value));
    }
    let line = "foretell plan --model gpt2 --topology 4xa100-80g --global-batch 64 --method lora --adapter rank=8,targets=attention \
                --loss chunked --optimizer adamw-8bit --headroom 10% --fix recompute=full,micro_batch=1";
    let is_asked = format!("document.getElementById('line').textContent === '{line}'");
    wait(&mut browser, &is_asked);
    wait(&mut browser, "document.getElementById('state').textContent.startsWith('The search is over')");
    let stated = browser.evaluate("document.getElementById('more-stated').textContent");
    assert!(stated.as_str().is_some_and(|text| text.contains("optimizer adamw-8bit; loss kernel chunked")), "{stated}");

    // Both configurations stand side by side with what they state.
    let rows = "[...document.querySelectorAll('#beside tbody tr')].map((row) => [...row.cells].map((cell) => cell.textContent).slice(0, 3))";
    let rows = browser.evaluate(rows);
    for (title, value) in [("adapters", "rank=8,targets=attention"), ("optimizer", "adamw-8bit"), ("headroom", "10%")] {
        let row = json!([title, "as usual", value]);
        assert!(rows.as_array().is_some_and(|rows| rows.contains(&row)), "{row}: {rows}");
    }
    assert!(!rows.to_string().contains("attention kernel"), "{rows}");

    // The address alone brings all of them back.
    let address = browser.evaluate("location.href").as_str().expect("an address").to_owned();
    browser.visit("about:blank");
    browser.visit(&address);
    wait(&mut browser, &is_asked);
    for (field, value) in choices {
        assert_eq!(browser.evaluate(&format!("document.getElementById('{field}').value")), value);
    }
    assert_eq!(browser.evaluate("document.getElementById('adapter').value"), "rank=8,targets=attention");

    // The table of what fits has them, too.
    browser.evaluate(
        "document.getElementById('fits-rows').value = 'batch'; document.getElementById('fits-columns').value = 'loss'; \
         document.getElementById('fits-ask').click()",
    );
    wait(&mut browser, "/recompute full/.test(document.querySelector('#fits-table tbody td')?.title)");
    assert_eq!(complaints(&mut browser, &url), [""; 0]);
}

#[test]
fn choices_that_a_method_does_not_have_are_left_out_and_named() {
    let Some(mut browser) = browser("planner, choices by method") else { return };
    let scratch = Scratch::new();
    let (_server, url) = Server::start(&scratch, &[]);
    resize(&mut browser, 1280, "light");
    let text = |browser: &mut Browser, id: &str| {
        browser.evaluate(&format!("document.getElementById('{id}').textContent")).as_str().unwrap_or_default().to_owned()
    };
    let hidden = "['adapter-field', 'bits-field'].map((id) => document.getElementById(id).hidden)";
    open(&mut browser, &url, &format!("{SMALL}&method=lora&adapter=rank%3D8&bits=4"));
    assert_eq!(browser.evaluate(hidden), json!([false, false]));
    assert!(text(&mut browser, "line").contains("--adapter rank=8 --base-bits 4"), "{}", text(&mut browser, "line"));
    assert_eq!(text(&mut browser, "left-out"), "");
    let methods = [
        ("full", [true, true], "", "Left out with full: adapters rank=8; bits of frozen weights 4."),
        ("qlora", [false, true], " --adapter rank=8", "Left out with qlora: bits of frozen weights 4."),
        ("lora", [false, false], " --adapter rank=8 --base-bits 4", ""),
    ];
    for (method, are_hidden, options, left_out) in methods {
        browser.evaluate(&filled("method", method));
        let line = format!("foretell plan --model gpt2 --topology 4xa100-80g --global-batch 64 --method {method}{options}");
        wait(&mut browser, &format!("document.getElementById('line').textContent === '{line}'"));
        assert_eq!(browser.evaluate(hidden), json!(are_hidden), "{method}");
        assert_eq!(text(&mut browser, "left-out"), left_out);
    }
    // Preferences train adapters if some are described, and only then have frozen weights.
    browser.evaluate(&filled("method", "dpo"));
    assert_eq!(browser.evaluate(hidden), json!([false, false]));
    browser.evaluate(&filled("adapter", ""));
    assert_eq!(browser.evaluate(hidden), json!([false, true]));
    assert_eq!(text(&mut browser, "left-out"), "Left out without adapters: bits of frozen weights 4.");
    // Preferences that compare with a reference may have it computed before.
    let reference = "document.getElementById('reference-field').hidden";
    assert_eq!(browser.evaluate(reference), json!(false));
    browser.evaluate(&filled("bits", ""));
    browser.evaluate(&filled("reference", "precomputed"));
    wait(&mut browser, "document.getElementById('line').textContent.endsWith('--method dpo --reference precomputed')");
    browser.evaluate(&filled("method", "orpo"));
    assert_eq!(browser.evaluate(reference), json!(true));
    assert_eq!(text(&mut browser, "left-out"), "Left out with orpo: reference model precomputed.");
}

#[test]
fn a_mistake_in_a_choice_is_said_at_its_field() {
    let Some(mut browser) = browser("planner, mistakes") else { return };
    let scratch = Scratch::new();
    let (_server, url) = Server::start(&scratch, &[]);
    resize(&mut browser, 390, "light");
    open(&mut browser, &url, &format!("{SMALL}&optimizer=adamw-8bit"));
    assert_eq!(browser.evaluate("document.getElementById('more').open"), false);
    let wrong = "[...document.querySelectorAll('#more [aria-invalid=true]')].map((field) => field.id).join()";
    let is_wrong = |fields: &str| format!("{wrong} === '{fields}'");
    for (field, value, word) in
        [("fix", "recompute=maybe", "recompute"), ("fix", "tensor=5", "5 ranks"), ("headroom", "much", "share")]
    {
        browser.evaluate(&filled(field, value));
        wait(&mut browser, &is_wrong(field));
        let said = browser.evaluate(&format!("document.getElementById('{field}-wrong').textContent"));
        assert!(said.as_str().is_some_and(|said| said.contains(word) && said.contains("Hint: ")), "{said}");
        assert_eq!(browser.evaluate("document.getElementById('more').open"), true);
        let wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth";
        assert_eq!(browser.evaluate(wider), 0, "{said}");
        browser.evaluate(&filled(field, ""));
        wait(&mut browser, &is_wrong(""));
    }
    // A stack that does not know a kernel refuses it. The optimizer is stated too, and not meant.
    browser.evaluate(&filled("attention", "eager"));
    wait(&mut browser, &is_wrong("attention"));
    assert_eq!(complaints(&mut browser, &url), [""; 0]);
}

#[test]
fn a_keyboard_reaches_every_control_of_the_planner() {
    let Some(mut browser) = browser("planner, keyboard") else { return };
    let scratch = Scratch::new();
    let (_server, url) = Server::start(&scratch, &[]);
    resize(&mut browser, 1280, "light");
    open(&mut browser, &url, SMALL);
    browser.evaluate("document.getElementById('more').open = true");
    let controls =
        "[...document.querySelectorAll('button, select, input, pre, summary')].filter((one) => one.getClientRects().length)";
    browser
        .evaluate(&format!("{controls}.forEach((one) => one.addEventListener('focus', () => {{ one.dataset.reached = 1; }}))"));
    for _ in 0..90 {
        browser.press("Tab");
    }
    let left = format!("{controls}.filter((one) => !one.dataset.reached).map((one) => one.outerHTML.slice(0, 80))");
    assert_eq!(browser.evaluate(&left), json!([]));
}
