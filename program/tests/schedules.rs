//! Properties of every schedule: no deadlock, each pass once and in dependency order, activations
//! within the stated bound, and bubbles of the sizes in the papers.

use foretell_program::{Schedule, StagePass, Task, WovenOrders};
use proptest::prelude::*;
use std::collections::BTreeMap;

/// The result of running the orders of all stages.
struct Run {
    end: u64,
    /// The most activations that each stage held.
    held: Vec<usize>,
}

/// Runs the orders of all stages with the dependencies of the model. Each stage runs its next task
/// as soon as its inputs are there. A pass takes one unit of time, a backward pass with both
/// gradients two. Fails if a pass runs twice or not at all.
fn run(schedule: Schedule, stages: usize, micro_batches: usize, chunks: usize) -> Result<Run, TestCaseError> {
    let lists: Vec<Vec<Task>> = (0..stages).map(|stage| schedule.order(stages, micro_batches, chunks, stage)).collect();
    prop_assert_eq!(&lists, &schedule.orders(stages, micro_batches, chunks));
    let last = stages * chunks - 1;
    let places: Vec<(usize, usize)> = (0..=last).map(|position| schedule.place(stages, position)).collect();
    // The end of each pass (0 forward, 1 input gradient, 2 weight gradient) by position and
    // micro-batch.
    let mut done: BTreeMap<(u8, usize, usize), u64> = BTreeMap::new();
    let (mut next, mut free) = (vec![0; stages], vec![0u64; stages]);
    let (mut holds, mut most) = (vec![0usize; stages], vec![0usize; stages]);
    loop {
        let mut progress = false;
        for stage in 0..stages {
            while let Some(task) = lists[stage].get(next[stage]) {
                let position = places.iter().position(|&place| place == (stage, task.chunk)).expect("every chunk has a place");
                prop_assert_eq!(schedule.position(stages, stage, task.chunk), position);
                let before = |pass, position| done.get(&(pass, position, task.micro_batch)).copied();
                let (needs, makes, takes): (Vec<Option<u64>>, &[u8], u64) = match task.pass {
                    StagePass::Forward => ((position > 0).then(|| before(0, position - 1)).into_iter().collect(), &[0], 1),
                    StagePass::Backward | StagePass::InputGradient => {
                        let mut needs = vec![before(0, position)];
                        needs.extend((position < last).then(|| before(1, position + 1)));
                        prop_assert_eq!(task.pass == StagePass::InputGradient, schedule.splits_backward());
                        if task.pass == StagePass::Backward { (needs, &[1, 2], 2) } else { (needs, &[1], 1) }
                    }
                    StagePass::WeightGradient => (vec![before(1, position)], &[2], 1),
                };
                let Some(ready) = needs.into_iter().collect::<Option<Vec<u64>>>() else { break };
                let start = ready.into_iter().max().unwrap_or(0).max(free[stage]);
                free[stage] = start + takes;
                for &made in makes {
                    let twice = done.insert((made, position, task.micro_batch), free[stage]);
                    prop_assert!(twice.is_none(), "{task:?} of stage {stage} runs twice");
                }
                holds[stage] += usize::from(task.pass == StagePass::Forward);
                most[stage] = most[stage].max(holds[stage]);
                holds[stage] -= usize::from(task.pass.is_last());
                next[stage] += 1;
                progress = true;
            }
        }
        if !progress {
            break;
        }
    }
    prop_assert_eq!(done.len(), 3 * stages * chunks * micro_batches, "a deadlock or a missing pass");
    prop_assert!(
        (0..stages).all(|stage| next[stage] == lists[stage].len()),
        "passes of chunks or micro-batches that do not exist"
    );
    Ok(Run { end: free.into_iter().max().unwrap_or(0), held: most })
}

/// The duration of the step beyond the work of one stage.
fn bubble(schedule: Schedule, stages: usize, micro_batches: usize, chunks: usize) -> Result<u64, TestCaseError> {
    Ok(run(schedule, stages, micro_batches, chunks)?.end - (3 * micro_batches * chunks) as u64)
}

/// Every schedule, with at most four chunks on each stage.
fn schedules() -> impl Strategy<Value = (Schedule, usize)> {
    proptest::sample::select(Schedule::ALL.to_vec()).prop_flat_map(|schedule| {
        let chunks = schedule.chunks();
        (Just(schedule), *chunks.start()..=(*chunks.end()).min(4))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 800, ..ProptestConfig::default() })]

    #[test]
    fn every_order_starts_like_one_of_its_beginnings(
        (schedule, chunks) in schedules(), stages in 1usize..9, micro_batches in 1usize..60
    ) {
        let orders = schedule.orders(stages, micro_batches, chunks);
        let beginnings = schedule.beginnings(stages, micro_batches, chunks);
        for (stage, order) in orders.iter().enumerate() {
            let (mut held, mut most, mut end) = (0usize, 0, 0);
            for (place, task) in order.iter().enumerate() {
                match task.pass {
                    StagePass::Forward => held += 1,
                    StagePass::Backward | StagePass::InputGradient => held -= 1,
                    StagePass::WeightGradient => {}
                }
                if held > most {
                    (most, end) = (held, place + 1);
                }
            }
            let begins = |beginning: &Vec<Vec<Task>>| beginning[stage].get(..end) == Some(&order[..end]);
            prop_assert!(beginnings.iter().any(begins), "stage {stage}");
        }
    }

    #[test]
    fn every_pass_runs_once_and_stages_hold_at_most_their_bound(
        (schedule, chunks) in schedules(), stages in 1usize..9, micro_batches in 1usize..25
    ) {
        prop_assert!(schedule.allows(chunks));
        let held = run(schedule, stages, micro_batches, chunks)?.held;
        let bounds: Vec<usize> =
            (0..stages).map(|stage| schedule.in_flight_bound(stages, micro_batches, chunks, stage)).collect();
        prop_assert!(held.iter().zip(&bounds).all(|(held, bound)| held <= bound), "{held:?} exceeds {bounds:?}");
        // The bound is tight on some stage.
        prop_assert!(held.iter().zip(&bounds).any(|(held, bound)| held == bound), "{held:?} never reaches {bounds:?}");
    }

    #[test]
    fn woven_orders_run_each_pass_once_and_only_fill_the_pipeline_later(
        (schedule, chunks) in schedules(), stages in 1usize..9, micro_batches in 1usize..25
    ) {
        let woven = schedule.woven_orders(stages, micro_batches, chunks);
        let plain = WovenOrders::unpaired(schedule.orders(stages, micro_batches, chunks));
        let (end, limit) = (woven.finish(schedule, stages, chunks), plain.finish(schedule, stages, chunks) + stages as u64 - 1);
        prop_assert!(end <= limit, "{end} exceeds {limit}");
        for (order, pairs) in woven.orders.iter().zip(&woven.pairs) {
            // Half a backward pass counts once, a whole one twice.
            let mut passes: BTreeMap<(bool, usize, usize), usize> = BTreeMap::new();
            for task in order {
                let key = (task.pass == StagePass::Forward, task.micro_batch, task.chunk);
                *passes.entry(key).or_default() += if task.pass == StagePass::Backward { 2 } else { 1 };
            }
            prop_assert_eq!(passes.len(), 2 * micro_batches * chunks);
            prop_assert!(passes.iter().all(|((is_forward, ..), &count)| count == 2 - usize::from(*is_forward)));
            prop_assert!(pairs.windows(2).all(|two| two[0] + 1 < two[1]), "{pairs:?} share tasks");
            for &first in pairs {
                let (one, other) = (order[first], order[first + 1]);
                prop_assert_ne!(one.micro_batch, other.micro_batch);
                prop_assert!((one.pass == StagePass::Forward) != (other.pass == StagePass::Forward));
                prop_assert!(one.pass != StagePass::WeightGradient && other.pass != StagePass::WeightGradient);
            }
        }
        if schedule == Schedule::Interleaved && chunks > 1 && micro_batches >= 4 * stages && micro_batches % stages == 0 {
            prop_assert!(3 * woven.pair_count() >= stages * micro_batches, "{} pairs", woven.pair_count());
        }
    }

    #[test]
    fn bubbles_have_the_sizes_of_the_papers(stages in 1usize..9, micro_batches in 1usize..25, chunks in 2usize..5) {
        use Schedule::{Gpipe, Interleaved, OneForwardOneBackward, ZeroBubbleH1, ZeroBubbleV};
        let idle = stages as u64 - 1;
        let one = bubble(OneForwardOneBackward, stages, micro_batches, 1)?;
        prop_assert_eq!(one, 3 * idle);
        prop_assert_eq!(bubble(Gpipe, stages, micro_batches, 1)?, one);
        let h1 = bubble(ZeroBubbleH1, stages, micro_batches, 1)?;
        prop_assert!(h1 <= one);
        if micro_batches >= stages {
            prop_assert_eq!(h1, idle, "ZB-H1 has a third of 1F1B's bubble");
        }
        // From here on the unit is the pass of a chunk. Schedules of one chunk take as many times
        // as long.
        let v = bubble(ZeroBubbleV, stages, micro_batches, 2)?;
        prop_assert!(v <= 2 * one);
        if micro_batches >= 2 * stages {
            prop_assert!(v <= 2 * h1);
            prop_assert!((idle..=idle + 1).contains(&v), "ZB-V has only the {idle} units of filling the pipeline: {v}");
        }
        let interleaved = bubble(Interleaved, stages, micro_batches, chunks)?;
        if micro_batches % stages == 0 {
            prop_assert_eq!(interleaved, 3 * idle, "1F1B's bubble is divided by the number of chunks");
        }
    }
}

#[test]
fn zero_bubble_schedules_hold_as_much_as_1f1b() {
    for stages in 1..9 {
        let most = |schedule: Schedule, chunks| {
            (0..stages).map(|stage| schedule.in_flight_bound(stages, 24, chunks, stage)).max().unwrap_or(0)
        };
        let one = most(Schedule::OneForwardOneBackward, 1);
        assert_eq!(most(Schedule::ZeroBubbleH1, 1), one);
        assert_eq!(most(Schedule::ZeroBubbleV, 2), 2 * one, "its chunks are half as large");
    }
}

#[test]
fn an_interleaved_stage_has_megatrons_order() {
    // The first of two stages, four micro-batches, two chunks: a small version of Narayanan et al.
    // 2021, figure 4.
    let list = Schedule::Interleaved.order(2, 4, 2, 0);
    let text: Vec<String> = list
        .iter()
        .map(|task| format!("{}{}.{}", if task.pass == StagePass::Forward { "F" } else { "B" }, task.micro_batch, task.chunk))
        .collect();
    assert_eq!(text.join(" "), "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0");
}

/// The steps of `dualpipev.py` for the first of two ranks and six micro-batches.
#[test]
fn a_woven_v_shaped_stage_has_the_order_of_dual_pipe_v() {
    let woven = Schedule::ZeroBubbleV.woven_orders(2, 6, 2);
    let letter = |task: &Task| match task.pass {
        StagePass::Forward => "F",
        StagePass::Backward => "B",
        StagePass::InputGradient => "I",
        StagePass::WeightGradient => "W",
    };
    let tasks = woven.orders[0].iter().enumerate().map(|(index, task)| {
        let link = if woven.pairs[0].contains(&index) { "&" } else { " " };
        format!("{}{}.{}{link}", letter(task), task.micro_batch, task.chunk)
    });
    assert_eq!(
        tasks.collect::<String>().trim_end(),
        "F0.0 F1.0 F2.0 F0.1 I0.1 W0.1 F1.1 F3.0&B1.1 F2.1&B0.0 F4.0&B2.1 F3.1&B1.0 F5.0&B3.1 F4.1&B2.0 B4.1 F5.1&B3.0 B5.1 I4.0 W4.0 I5.0 W5.0"
    );
    let held = |order: &Vec<Task>| {
        let mut held = 0usize;
        let counts = order.iter().map(|task| {
            held += usize::from(task.pass == StagePass::Forward);
            let now = held;
            held -= usize::from(task.pass.is_last());
            now
        });
        counts.max().unwrap_or(0)
    };
    assert!(woven.orders.iter().all(|order| held(order) == 2 * 2 + 1), "one more than ZB-V");
}
