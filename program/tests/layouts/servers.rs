//! Parameter servers: the bytes that workers push, and the memory that formats of pushes take.

use super::*;
use foretell_models::Compression;

const FORMATS: [Compression; 3] = [Compression::Bf16, Compression::Fp16, Compression::Int8];

/// Three workers and two servers.
fn served(staleness: &str, compression: &str) -> Program {
    let mode = format!(r#"{{"parameter_server": {{"servers": 2, "staleness": {staleness}, "compression": "{compression}"}}}}"#);
    let mode = serde_json::from_str(&mode).expect("a mode");
    let layout = Layout { data: 3, bucket: Bytes::new(4096), ..Layout::default() };
    let model = Model::Mlp(Mlp { widths: vec![64, 48, 40, 10] });
    compile(&model, "model", &Plan { mode, ..Plan::new(layout, 6) }).expect("a plan that fits").training
}

/// The bytes of each message of an update, sent or received, in order.
fn pushes(list: &StageProgram) -> Vec<usize> {
    let bytes = |instruction: &Instruction| match *instruction.operation {
        Operation::Send { bytes, .. } | Operation::Receive { bytes, .. } => Some(bytes.count() as usize),
        _ => None,
    };
    list.instructions.iter().filter(|instruction| instruction.phase == Phase::Update).filter_map(bytes).collect()
}

fn persistent(list: &StageProgram) -> usize {
    let kept = list.buffers.iter().filter(|buffer| buffer.persistent && buffer.parent.is_none());
    kept.map(|buffer| buffer.bytes.count() as usize).sum()
}

#[test]
fn compressed_pushes_have_the_bytes_of_their_format() {
    for staleness in ["0", "2"] {
        let plain = served(staleness, "none");
        let sent = pushes(&plain.lists[0]);
        assert!(sent.len() > 4, "several buckets to two servers: {sent:?}");
        for format in FORMATS {
            let program = served(staleness, format.name());
            let expected: Vec<usize> = sent.iter().map(|bytes| format.bytes(bytes / 4)).collect();
            assert_eq!(pushes(&program.lists[0]), expected, "{format:?}");
            // A server receives its half of each worker's pushes.
            let received: usize = pushes(&program.lists[1]).iter().sum();
            assert_eq!(2 * received, 3 * expected.iter().sum::<usize>(), "{format:?}");
        }
    }
}

#[test]
fn compressed_pushes_take_memory_for_residuals_and_messages() {
    for staleness in ["0", "2"] {
        let plain = served(staleness, "none");
        // Each bucket's parts are of equal size, and one goes to each server.
        let parts: Vec<usize> = pushes(&plain.lists[0]).iter().step_by(2).map(|bytes| bytes / 4).collect();
        for format in FORMATS {
            let program = served(staleness, format.name());
            let [worker, server] = [0, 1].map(|list| {
                let [with, without] = [&program, &plain].map(|program| persistent(&program.lists[list]));
                with as i64 - without as i64
            });
            assert_eq!(worker, parts.iter().map(|part| 2 * 4 * part).sum::<usize>() as i64, "{format:?}");
            // Workers at their own pace have a message each. One buffer holds the gradients of any.
            let of_part = |&part: &usize| 4 * part as i64 + 3 * (format.bytes(part) as i64 - 4 * part as i64);
            let expected = if staleness == "0" { 0 } else { parts.iter().map(of_part).sum() };
            assert_eq!(server, expected, "{format:?}");
        }
    }
}
