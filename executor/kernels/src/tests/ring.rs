//! The steps of ring attention, merged, against the whole attention in double precision.

use super::{PARAMETERS, Tensor, all_backends, attention, dropped, operands_in, reference, run_in};
use foretell_models::{Attention, AttentionDropout, Kernel, RingStep, Zigzag};
use foretell_units::DataType;
use rand::SeedableRng as _;
use rand_chacha::ChaCha8Rng;

const PARTS: usize = 3;

/// Positions of a sequence.
const POSITIONS: usize = 66;

/// The positions of one part of `x`, `[outer, POSITIONS, inner]`, as they are stored.
fn part_in(order: Option<Zigzag>, x: &[f64], outer: usize, index: usize) -> Tensor {
    let line = x.len() / outer;
    let (own, inner) = (POSITIONS / PARTS, line / POSITIONS);
    let of_line = |line: &[f64]| -> Tensor {
        let positions = (index * own..(index + 1) * own).map(|index| order.map_or(index, |order| order.position(index)));
        positions.flat_map(|position| line[position * inner..][..inner].to_vec()).collect()
    };
    x.chunks(line).flat_map(of_line).collect()
}

fn assert_near(what: &str, computed: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(computed.len(), expected.len());
    let scale = expected.iter().fold(1e-3_f64, |largest, value| largest.max(value.abs()));
    for (position, (computed, expected)) in computed.iter().zip(expected).enumerate() {
        assert!((computed - expected).abs() <= tolerance * scale, "{what} at {position}: {computed} for {expected}");
    }
}

#[test]
fn the_steps_of_a_ring_merged_are_the_whole_attention() {
    let mut random = ChaCha8Rng::seed_from_u64(7);
    let zigzag = Zigzag::new(PARTS, POSITIONS);
    for (causal, drops, order) in [
        (false, false, None),
        (true, false, None),
        (false, true, None),
        (true, true, None),
        (true, false, zigzag),
        (true, true, zigzag),
    ] {
        let part = |x: &[f64], outer: usize, index: usize| part_in(order, x, outer, index);
        for (precision, sharpness, head_dimension) in [
            (DataType::Fp32, 1.0, 8),
            (DataType::Fp32, 128.0, 8),
            (DataType::Bf16, 1.0, 8),
            (DataType::Fp16, 1.0, 8),
            // On tensor cores, where there are.
            (DataType::Bf16, 1.0, 64),
            (DataType::Fp16, 1.0, 40),
        ] {
            // What is dropped does not depend on what is seen: half of the long cases will do.
            if head_dimension > 8 && causal != drops && order.is_none() {
                continue;
            }
            let dropout = drops.then(dropped);
            let whole = Attention { group: 2, dropout, ..attention([2, POSITIONS, 2, head_dimension], causal, false) };
            let (mut reads, _) = operands_in(&Kernel::AttentionGradient(whole), precision, &mut random);
            // Scores of which single exponentials would overflow.
            reads[1].iter_mut().for_each(|q| *q *= sharpness);
            let inputs: Vec<Tensor> = reads[1..4].to_vec();
            let mut forward = reference::run(&Kernel::Attention(whole), &inputs, &[], false, &PARAMETERS, 0);
            let (rows, batch) = (whole.batch * whole.heads(), whole.batch);
            // The exponential of a large score is as wrong as the score's last digit is large.
            let close = 1e-5 * f64::max(sharpness / 16.0, 1.0);
            // There probabilities are rounded before they are multiplied.
            let (bf16, fp16) = (2.0_f64.powi(-8), 2.0_f64.powi(-11));
            let close_outputs = match precision {
                DataType::Bf16 if head_dimension > 8 => bf16,
                DataType::Fp16 if head_dimension > 8 => fp16,
                _ => close,
            };
            let step = |step| Attention {
                queries: whole.queries / PARTS,
                keys: whole.keys / PARTS,
                zigzag: order,
                ring: Some(RingStep { step, parts: PARTS, unseen: false, half: None }),
                dropout: dropout.map(|dropout| AttentionDropout { position_parts: PARTS, ..dropout }),
                ..whole
            };
            let from = |index: usize, step: usize| (index + PARTS - step) % PARTS;
            for backend in &mut all_backends() {
                for index in 0..PARTS {
                    let q = part(&inputs[0], batch, index);
                    // What is there before the first step must not show.
                    let mut merged = vec![vec![9.0; q.len()], vec![1e9; step(0).rows()]];
                    for t in 0..PARTS {
                        let chunk = |which: usize| part(&inputs[which], batch, from(index, t));
                        let kernel = Kernel::Attention(step(t));
                        merged = run_in(
                            backend.as_mut(),
                            precision,
                            &kernel,
                            &[q.clone(), chunk(1), chunk(2)],
                            &merged,
                            false,
                            false,
                            index,
                        );
                    }
                    assert_near("out", &merged[0], &part(&forward[0], batch, index), close_outputs);
                    assert_near("log-sum-exp", &merged[1], &part(&forward[1], rows, index), close);
                }
            }
            if sharpness > 1.0 {
                // Gradients multiply that once more.
                continue;
            }
            let half = |tensor: &mut Tensor| match crate::half::SixteenBits::of(precision) {
                Some(half) => tensor.iter_mut().for_each(|x| *x = f64::from(half.to_single(half.nearest(*x as f32)))),
                None => tensor.iter_mut().for_each(|x| *x = f64::from(*x as f32)),
            };
            half(&mut forward[0]);
            let all = [vec![reads[0].clone()], inputs.clone(), forward.clone()].concat();
            let expected = reference::run(&Kernel::AttentionGradient(whole), &all, &[], false, &PARAMETERS, 0);
            // A rounded output makes all its row's gradients wrong by as much.
            let tolerance = match precision {
                DataType::Bf16 => 2e-2,
                DataType::Fp16 => 2e-3,
                _ => 1e-5,
            };
            for backend in &mut all_backends() {
                let mut sums = [vec![vec![]; PARTS], vec![vec![]; PARTS]];
                for index in 0..PARTS {
                    let own = |x: &Tensor, outer| part(x, outer, index);
                    let mut dq = vec![7.0; own(&inputs[0], batch).len()];
                    for t in 0..PARTS {
                        let chunk = from(index, t);
                        let operands = [
                            own(&reads[0], batch),
                            own(&inputs[0], batch),
                            part(&inputs[1], batch, chunk),
                            part(&inputs[2], batch, chunk),
                            own(&forward[0], batch),
                            own(&forward[1], rows),
                        ];
                        let elements = operands[2].len();
                        let before = [dq, vec![5.0; elements], vec![5.0; elements]];
                        let kernel = Kernel::AttentionGradient(step(t));
                        let mut written = run_in(backend.as_mut(), precision, &kernel, &operands, &before, false, false, index);
                        for sums in sums.iter_mut().rev() {
                            let made = written.pop().expect("three gradients");
                            let sum: &mut Tensor = &mut sums[chunk];
                            sum.resize(made.len(), 0.0);
                            sum.iter_mut().zip(made).for_each(|(sum, made)| *sum += made);
                        }
                        dq = written.remove(0);
                    }
                    assert_near("dq", &dq, &part(&expected[0], batch, index), tolerance);
                }
                for (name, sums, expected) in [("dk", &sums[0], &expected[1]), ("dv", &sums[1], &expected[2])] {
                    for (index, sum) in sums.iter().enumerate() {
                        assert_near(name, sum, &part(expected, batch, index), tolerance);
                    }
                }
            }
        }
    }
}
