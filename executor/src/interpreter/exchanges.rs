//! Exchanges between replicas, against DiLoCo fragment by fragment as its papers state it.
//!
//! The updates and exchanges of real Programs run here with real kernels, all replicas on one
//! device and without processes. Each replica has a quadratic loss of its own for every element of
//! a parameter, so that its gradients follow from its parameters.

use crate::backend::{Backend as _, CpuBackend, Hyperparameters, KernelCall, Operand};
use foretell_models::{Graph, GraphOptions, Mlp, Model, Optimizer, TensorId};
use foretell_program::{
    BufferId, Collective, Compiled, Layout, Mode, Operation, Phase, Plan, Program, StageProgram, StateContents, StateValue,
    compile,
};

const RATE: f64 = 0.1;

/// A number from -1 to 1 for each combination of others.
fn number(of: [usize; 4]) -> f64 {
    let mix = |state: u64, word: usize| (state ^ word as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(29);
    let bits = of.into_iter().fold(7, mix).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    (bits >> 11) as f64 / (1u64 << 52) as f64 - 1.0
}

/// The gradient of a replica's loss at an element.
fn gradient(replica: usize, tensor: TensorId, element: usize, parameter: f64) -> f64 {
    let [curvature, target] = [1, 2].map(|kind| number([kind, replica, tensor.0, element]));
    (1.0 + 0.5 * curvature) * (parameter - target)
}

fn first_value(tensor: TensorId, element: usize) -> f64 {
    number([0, 0, tensor.0, element])
}

/// A mode of the plan, as the reference understands it.
struct Diloco {
    replicas: usize,
    every: usize,
    fragments: usize,
    overlap: usize,
    mixing: f64,
    rate: f64,
    momentum: f64,
}

/// An element of a parameter, in every replica.
struct Element {
    tensor: TensorId,
    number: usize,
    fragment: usize,
    own: Vec<f64>,
    outer: f64,
    velocity: f64,
    change: f64,
}

impl Diloco {
    /// Makes a step of all replicas, and what of exchanges comes with it.
    fn step(&self, step: usize, elements: &mut [Element]) {
        for element in elements {
            for (replica, own) in element.own.iter_mut().enumerate() {
                *own -= RATE * gradient(replica, element.tensor, element.number, *own);
            }
            let last = self.every * (element.fragment + 1) / self.fragments - 1;
            if step % self.every == last - self.overlap {
                element.change = element.own.iter().map(|own| element.outer - own).sum::<f64>() / self.replicas as f64;
            }
            if step % self.every == last {
                element.velocity = self.momentum * element.velocity + element.change;
                element.outer -= self.rate * (element.change + self.momentum * element.velocity);
                let outer = element.outer;
                element.own.iter_mut().for_each(|own| *own = self.mixing * *own + (1.0 - self.mixing) * outer);
            }
        }
    }
}

/// A replica's memory.
struct Replica {
    arena: Vec<u128>,
}

impl Replica {
    fn operand(&mut self, list: &StageProgram, id: BufferId) -> Operand {
        let buffer = list.buffer(id);
        let start = buffer.offset.count() as usize;
        assert!(start + buffer.bytes.count() as usize <= 16 * self.arena.len());
        Operand { pointer: self.arena.as_mut_ptr().cast::<u8>().wrapping_add(start), bytes: buffer.bytes.count() as usize }
    }

    fn bytes(&mut self, list: &StageProgram, id: BufferId) -> &mut [u8] {
        let operand = self.operand(list, id);
        // SAFETY: the operand lies in the arena, which this borrows.
        unsafe { std::slice::from_raw_parts_mut(operand.pointer, operand.bytes) }
    }

    fn value(&mut self, list: &StageProgram, id: BufferId, element: usize) -> f64 {
        f64::from(f32::from_ne_bytes(self.bytes(list, id)[4 * element..][..4].try_into().expect("four bytes")))
    }

    fn set(&mut self, list: &StageProgram, id: BufferId, element: usize, value: f64) {
        self.bytes(list, id)[4 * element..][..4].copy_from_slice(&(value as f32).to_ne_bytes());
    }
}

/// Runs the updates and exchanges of a Program in all replicas.
fn run(program: &Program, replicas: &mut [Replica], hyperparameters: &Hyperparameters, backend: &mut CpuBackend) {
    let list = &program.lists[0];
    for instruction in &list.instructions {
        match *instruction.operation {
            Operation::Compute { ref kernel, accumulate, .. } if instruction.phase == Phase::Update => {
                for replica in replicas.iter_mut() {
                    let mut operands = |ids: &[BufferId]| ids.iter().map(|&id| replica.operand(list, id)).collect::<Vec<_>>();
                    let (reads, writes) = (operands(&instruction.reads), operands(&instruction.writes));
                    let call = KernelCall {
                        kernel,
                        reads: &reads,
                        writes: &writes,
                        accumulate,
                        hyperparameters,
                        group_index: 0,
                        samples_before: 0,
                        precision: program.precision,
                    };
                    // SAFETY: the operands lie in the replica's arena, which nothing else uses.
                    unsafe { backend.run(&call) }.expect("the kernel runs");
                }
            }
            Operation::Collective { kind, .. } => {
                let (from, to) = (instruction.reads[0], instruction.writes[0]);
                let sent: Vec<Vec<u8>> = replicas.iter_mut().map(|replica| replica.bytes(list, from).to_vec()).collect();
                for (index, replica) in replicas.iter_mut().enumerate() {
                    replica.bytes(list, to).copy_from_slice(&received(kind, index, &sent));
                }
            }
            _ => {}
        }
    }
}

/// The bytes that a member of a collective receives.
fn received(kind: Collective, index: usize, sent: &[Vec<u8>]) -> Vec<u8> {
    match kind {
        Collective::AllGather => sent.concat(),
        Collective::AllToAll => {
            let part = sent[0].len() / sent.len();
            sent.iter().flat_map(|values| values[index * part..][..part].to_vec()).collect()
        }
        Collective::AllReduce => {
            let numbers = |bytes: &Vec<u8>| bytes.as_chunks::<4>().0.iter().map(|&bits| f32::from_ne_bytes(bits)).collect();
            let all: Vec<Vec<f32>> = sent.iter().map(numbers).collect();
            (0..all[0].len()).flat_map(|place| all.iter().map(|values| values[place]).sum::<f32>().to_ne_bytes()).collect()
        }
        _ => unreachable!("replicas exchange otherwise"),
    }
}

/// The buffers with a kind of value of the parameters: the place of each element of each tensor.
fn places(list: &StageProgram, graph: &Graph, wanted: StateValue) -> Vec<(TensorId, BufferId, usize)> {
    let mut places = Vec::new();
    for (id, buffer) in (0..).zip(&list.buffers) {
        if let Some(StateContents::Tensors { value, members, .. }) = buffer.state.as_deref()
            && *value == wanted
        {
            places.extend(members.iter().map(|(start, shard)| (shard.tensor, BufferId(id), *start)));
        }
    }
    assert_eq!(places.len(), graph.parameters().count());
    places
}

/// The gradients beside a buffer of parameters.
fn gradients_of(list: &StageProgram, parameters: BufferId) -> BufferId {
    let name = list.buffer(parameters).name.replace("parameters", "gradients");
    let found = list.buffers.iter().position(|buffer| *buffer.name == *name && buffer.persistent && buffer.parent.is_none());
    BufferId(found.expect("gradients") as u32)
}

/// The largest difference between the parameters of Programs and reference after some rounds, which
/// is checked after every step, and the largest change of a parameter.
fn difference(diloco: &Diloco, compression: &str, steps: usize) -> f64 {
    let model = Model::Mlp(Mlp { widths: vec![12, 30, 9, 6] });
    let &Diloco { replicas: count, every, fragments, overlap, mixing, rate, momentum } = diloco;
    let mode: Mode = serde_json::from_str(&format!(
        r#"{{"local_sgd": {{"every": {every}, "fragments": {fragments}, "overlap": {overlap}, "mixing": {mixing},
            "compression": "{compression}",
            "outer": {{"optimizer": "nesterov", "learning_rate": {rate}, "momentum": {momentum}}}}}}}"#
    ))
    .expect("a mode");
    let plan = Plan { mode, optimizer: Optimizer::Sgd, ..Plan::new(Layout { data: count, ..Layout::default() }, count) };
    let compiled: Compiled = compile(&model, "model", &plan).expect("it compiles");
    let graph = model.graph("model", &GraphOptions::ONE).expect("a graph");
    let list = &compiled.training.lists[0];
    let parameters = places(list, &graph, StateValue::Parameter);
    let words = (list.arena.count() as usize).div_ceil(16);
    let mut replicas: Vec<Replica> = (0..count).map(|_| Replica { arena: vec![0; words] }).collect();
    let mut elements = Vec::new();
    for wanted in [StateValue::Parameter, StateValue::OuterParameter] {
        for (tensor, buffer, start) in places(list, &graph, wanted) {
            for replica in &mut replicas {
                let all = 0..graph.tensor(tensor).elements();
                all.for_each(|element| replica.set(list, buffer, start + element, first_value(tensor, element)));
            }
        }
    }
    for &(tensor, ..) in &parameters {
        let reader = graph.operators.iter().find(|operator| operator.inputs.iter().any(|input| input.tensor == tensor));
        let fragment = reader.expect("an operator").block % fragments;
        elements.extend((0..graph.tensor(tensor).elements()).map(|number| {
            let value = first_value(tensor, number);
            Element { tensor, number, fragment, own: vec![value; count], outer: value, velocity: 0.0, change: 0.0 }
        }));
    }
    assert_eq!(elements.iter().map(|element| element.fragment).max(), Some(fragments - 1), "each fragment has elements");
    let hyperparameters = Hyperparameters {
        learning_rate: RATE as f32,
        outer_learning_rate: rate as f32,
        outer_momentum: momentum as f32,
        outer_mixing: mixing as f32,
        ..Hyperparameters::default()
    };
    let (mut backend, mut largest) = (CpuBackend::new(), 0.0_f64);
    for step in 0..steps {
        for (index, replica) in replicas.iter_mut().enumerate() {
            for &(tensor, buffer, start) in &parameters {
                let gradients = gradients_of(list, buffer);
                for element in 0..graph.tensor(tensor).elements() {
                    let parameter = replica.value(list, buffer, start + element);
                    replica.set(list, gradients, start + element, gradient(index, tensor, element, parameter));
                }
            }
        }
        let program = compiled.step_programs()[compiled.cycle.program_of_step(step)];
        run(program, &mut replicas, &hyperparameters, &mut backend);
        diloco.step(step, &mut elements);
        let mut expected = elements.iter();
        for &(tensor, buffer, start) in &parameters {
            for (element, expected) in (0..graph.tensor(tensor).elements()).zip(&mut expected) {
                for (replica, own) in replicas.iter_mut().zip(&expected.own) {
                    largest = largest.max((replica.value(list, buffer, start + element) - own).abs());
                }
            }
        }
    }
    largest
}

#[test]
fn fragments_are_exchanged_as_diloco_exchanges_each_by_itself() {
    for (replicas, every, fragments, overlap, mixing) in [
        (2, 3, 1, 0, 0.0),
        (2, 4, 2, 0, 0.0),
        (3, 7, 3, 0, 0.0),
        (3, 5, 1, 0, 0.25),
        (2, 3, 1, 2, 0.0),
        (2, 4, 2, 1, 0.5),
        (4, 11, 3, 2, 0.25),
    ] {
        let diloco = Diloco { replicas, every, fragments, overlap, mixing, rate: 0.7, momentum: 0.9 };
        let difference = difference(&diloco, "fp32", 3 * every + 2);
        let case = format!("{replicas} replicas, every {every}, {fragments} fragments, overlap {overlap}, mixing {mixing}");
        assert!(difference < 1e-5, "{case}: {difference}");
    }
}

#[test]
fn compressed_changes_are_averaged_to_the_precision_of_their_format() {
    for (replicas, fragments, overlap) in [(2, 1, 0), (3, 1, 0), (2, 2, 1), (2, 2, 3), (3, 2, 2), (4, 2, 3), (3, 1, 5)] {
        for (format, most) in [("bf16", 2e-2), ("fp16", 3e-3), ("int8", 3e-2)] {
            let diloco = Diloco { replicas, every: 8, fragments, overlap, mixing: 0.25, rate: 0.7, momentum: 0.5 };
            let difference = difference(&diloco, format, 18);
            let case = format!("{format}, {replicas} replicas, {fragments} fragments, overlap {overlap}");
            assert!((1e-6..most).contains(&difference), "{case}: {difference}");
        }
    }
}
