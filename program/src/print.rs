//! Programs as readable text, for `foretell simulate --dump-program`.

use crate::program::{BufferId, Instruction, MemoryKind, Operation, PeerId, Program, StageProgram, Stream};
use foretell_units::Bytes;
use std::fmt::{self, Display, Formatter, Write as _};

impl Display for Program {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        for (number, stage) in self.lists.iter().enumerate() {
            let own = self.list_of_rank.iter().enumerate().filter(|(_, list)| **list as usize == number);
            let host = if stage.host_arena > Bytes::ZERO { format!(", {} on the host", stage.host_arena) } else { String::new() };
            let ranks: Vec<String> = own.map(|(rank, _)| rank.to_string()).collect();
            writeln!(
                formatter,
                "stage {} (ranks {}), arena {} ({} bytes){}, {} instructions",
                stage.stage,
                ranks.join(" "),
                stage.arena,
                stage.arena.count(),
                host,
                stage.instructions.len()
            )?;
            write_buffers(formatter, stage)?;
            for (index, instruction) in stage.instructions.iter().enumerate() {
                writeln!(formatter, "{}", instruction_line(stage, index, instruction))?;
            }
        }
        Ok(())
    }
}

fn write_buffers(formatter: &mut Formatter<'_>, stage: &StageProgram) -> fmt::Result {
    writeln!(formatter, "  kept from step to step:")?;
    for (index, buffer) in stage.buffers.iter().enumerate().filter(|(_, buffer)| buffer.persistent) {
        let indent = if buffer.parent.is_some() { "    " } else { "  " };
        let shape: Vec<String> = buffer.shape.iter().map(usize::to_string).collect();
        writeln!(
            formatter,
            "  {indent}#{index:<5} {:<44} {:>5}[{}] at {}{}",
            buffer.name,
            buffer.data_type.name(),
            shape.join(","),
            buffer.offset.count(),
            if buffer.memory == MemoryKind::Host { " on the host" } else { "" }
        )?;
    }
    Ok(())
}

fn instruction_line(stage: &StageProgram, index: usize, instruction: &Instruction) -> String {
    let operation = &*instruction.operation;
    let operation_text = match operation {
        Operation::Compute { accumulate: true, .. } => format!("{} +=", operation.kind()),
        Operation::Collective { group, bytes, .. } => {
            format!("{} {} {bytes}", operation.kind(), stage.groups[group.0 as usize])
        }
        Operation::Send { peer, bytes } => format!("send {} {bytes}", peer_name(stage, "to", *peer)),
        Operation::Traced { bytes, .. }
        | Operation::Copy { bytes, .. }
        | Operation::Save { bytes, .. }
        | Operation::Write { bytes } => {
            format!("{} {bytes}", operation.kind())
        }
        Operation::Receive { peer, bytes } => format!("receive {} {bytes}", peer_name(stage, "from", *peer)),
        _ => operation.kind().to_string(),
    };
    let micro_batch = instruction.micro_batch.map_or(String::new(), |index| format!("mb{index}"));
    let mut text = format!("{index:>6}  {operation_text:<38} {:<36} {micro_batch:<5}", stage.name_of(instruction));
    operands(&mut text, stage, "reads", &instruction.reads);
    operands(&mut text, stage, "writes", &instruction.writes);
    let stream = match &stage.streams[instruction.stream.0 as usize] {
        Stream::Group(group) => stage.groups[group.0 as usize].to_string(),
        Stream::SendTo(peer) => peer_name(stage, "to", *peer),
        Stream::ReceiveFrom(peer) => peer_name(stage, "from", *peer),
        other => other.to_string(),
    };
    // Writing to a String cannot fail.
    let _ = write!(text, " [{stream}]");
    if !instruction.after.is_empty() {
        let after: Vec<String> = instruction.after.iter().map(|id| id.0.to_string()).collect();
        let _ = write!(text, " after {}", after.join(" "));
    }
    text
}

/// A peer in words: its stage, and its index in `peers` if the two stages have different meshes.
fn peer_name(list: &StageProgram, direction: &str, peer: PeerId) -> String {
    let Some(known) = list.peers.get(peer.0 as usize) else { return format!("{direction} peer {}", peer.0) };
    match known.ranks {
        None => format!("{direction} stage {}", known.stage),
        Some(_) => format!("{direction} stage {} (peer {})", known.stage, peer.0),
    }
}

fn operands(text: &mut String, stage: &StageProgram, title: &str, buffers: &[BufferId]) {
    if buffers.is_empty() {
        return;
    }
    let _ = write!(text, " {title}");
    for &id in buffers {
        let buffer = stage.buffer(id);
        let _ = write!(text, " {}#{}@{}", buffer.name, id.0, buffer.offset.count());
    }
}
