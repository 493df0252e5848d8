//! `Program::check` finds faults that are planted into sound Programs.

use foretell_models::Model;
use foretell_program::{
    InstructionId, Layout, MemoryKind, Offload, Operation, Plan, Program, Schedule, Unsound, compile_training,
};
use std::sync::Arc;

/// Two pipeline stages, each of two ranks that share the operators.
fn program() -> Program {
    let layout = Layout { data: 2, tensor: 2, pipeline: 2, schedule: Schedule::OneForwardOneBackward, ..Layout::default() };
    compiled(Layout { zero: 1, ..layout })
}

fn compiled(layout: Layout) -> Program {
    let model = r#"{"family": "gpt", "layers": 4, "hidden": 16, "heads": 4, "vocab": 32, "sequence": 8}"#;
    let model: Model = serde_json::from_str(model).expect("a model");
    let batch = layout.samples_at_once() * 4;
    let program = compile_training(&model, "gpt", &Plan::new(layout, batch)).expect("a plan that divides the model");
    program.check().expect("sound");
    program
}

/// The places of a list's instructions whose operation is so.
fn places(program: &Program, list: usize, is_so: impl Fn(&Operation) -> bool) -> Vec<usize> {
    let instructions = program.lists[list].instructions.iter().enumerate();
    instructions.filter(|(_, instruction)| is_so(&instruction.operation)).map(|(index, _)| index).collect()
}

#[test]
fn an_instruction_that_waits_for_a_later_one_is_found() {
    let mut program = program();
    let last = InstructionId(program.lists[0].instructions.len() as u32 - 1);
    program.lists[0].instructions[0].after.push(last);
    assert!(matches!(program.check(), Err(Unsound::WaitsForLater { stage: 0, .. })));
}

#[test]
fn a_buffer_outside_of_its_arena_is_found() {
    let mut program = program();
    program.lists[1].arena = foretell_units::Bytes::new(program.lists[1].arena.count() / 2);
    assert!(matches!(program.check(), Err(Unsound::Outside { stage: 1, .. })));
}

#[test]
fn what_nothing_orders_is_a_race() {
    let whole = program();
    let mut races = 0;
    for index in 0..whole.lists[0].instructions.len() {
        let mut program = whole.clone();
        program.lists[0].instructions[index].after.clear();
        races += usize::from(matches!(program.check(), Err(Unsound::Race { stage: 0, .. })));
    }
    let waiting = whole.lists[0].instructions.iter().filter(|instruction| !instruction.after.is_empty()).count();
    // Some wait for what they would wait for anyway, or for memory of receives.
    assert!(races * 2 > waiting, "{races} of {waiting} are found");
}

#[test]
fn a_read_of_what_was_never_written_is_found() {
    let mut program = program();
    for buffer in program.lists[0].buffers.iter_mut() {
        buffer.persistent = false;
    }
    assert!(matches!(program.check(), Err(Unsound::Unwritten { stage: 0, .. })));
}

#[test]
fn memory_that_another_buffer_took_is_found() {
    let mut program = program();
    let list = &mut program.lists[0];
    // All parameters lie at one place.
    let persistent = list.buffers.iter_mut().filter(|buffer| buffer.persistent && buffer.parent.is_none());
    for buffer in persistent {
        buffer.offset = foretell_units::Bytes::ZERO;
    }
    assert!(program.check().is_err());
}

#[test]
fn a_send_without_its_receive_is_found() {
    let mut program = program();
    let sends = places(&program, 0, |operation| matches!(operation, Operation::Send { .. }));
    let list = &mut program.lists[0];
    let (first, second) = (sends[0], sends[1]);
    let micro_batch = list.instructions[first].micro_batch;
    list.instructions[first].micro_batch = list.instructions[second].micro_batch;
    list.instructions[second].micro_batch = micro_batch;
    assert!(matches!(program.check(), Err(Unsound::Unmatched { message: 0, .. })));
}

#[test]
fn stages_that_wait_for_each_other_are_a_deadlock() {
    let mut program = program();
    // The first stage sends its first activations only once it has received a gradient.
    let send = places(&program, 0, |operation| matches!(operation, Operation::Send { .. }))[0];
    let receive = places(&program, 0, |operation| matches!(operation, Operation::Receive { .. }))[0];
    let list = &mut program.lists[0];
    let mut moved = list.instructions[send].clone();
    moved.after = std::iter::once(InstructionId(receive as u32)).collect();
    // Keeps all numbers: the send goes to the place of the last of its stream before the receive.
    list.instructions[receive + 1] = moved;
    list.instructions[send] = list.instructions[0].clone();
    assert!(program.check().is_err());
}

#[test]
fn a_collective_that_a_member_lacks_is_a_deadlock() {
    let mut program = program();
    let collectives = places(&program, 1, |operation| matches!(operation, Operation::Collective { .. }));
    // One of the second stage's ranks runs a list of its own, without the last collective.
    let mut list = program.lists[1].clone();
    let last = *collectives.last().expect("gradients are reduced");
    let compute = places(&program, 1, |operation| matches!(operation, Operation::Compute { .. }))[0];
    list.instructions[last].operation = list.instructions[compute].operation.clone();
    list.instructions[last].stream = list.instructions[compute].stream;
    program.lists.push(list);
    let rank = (0..program.mesh.world_size()).rev().find(|&rank| program.list_of_rank[rank] == 1).expect("a rank of stage 1");
    program.list_of_rank[rank] = program.lists.len() as u32 - 1;
    assert!(matches!(program.check(), Err(Unsound::Deadlock { .. } | Unsound::Race { .. })), "{:?}", program.check());
}

#[test]
fn a_copy_that_stays_in_its_memory_is_found() {
    let mut program = compiled(Layout { data: 2, offload: Offload::Optimizer, ..Layout::default() });
    let copy = places(&program, 0, |operation| matches!(operation, Operation::Copy { .. }))[0];
    let instruction = &mut program.lists[0].instructions[copy];
    if let Operation::Copy { to, bytes } = *instruction.operation {
        let other = if to == MemoryKind::Host { MemoryKind::Device } else { MemoryKind::Host };
        instruction.operation = Arc::new(Operation::Copy { to: other, bytes });
    }
    assert!(matches!(program.check(), Err(Unsound::WrongMemory { stage: 0, .. })));
}
