//! What only moves numbers, and sums those that go to the same place.

use super::{Given, Tensor, index3};
use foretell_models::Kernel;

/// The writes of a kernel of this kind; of no other.
pub(super) fn run(kernel: &Kernel, given: &Given<'_>) -> Option<Vec<Tensor>> {
    let Given { reads, before, group_index, .. } = *given;
    let added = |index, value| given.added(index, value);
    Some(match *kernel {
        Kernel::Embedding { hidden, .. } => {
            vec![reads[0].iter().flat_map(|&id| reads[1][id as usize * hidden..][..hidden].to_vec()).collect()]
        }
        Kernel::EmbeddingWeightGradient { vocabulary, hidden, .. } => {
            let mut table = vec![0.0; vocabulary * hidden];
            for (i, dy) in reads[0].iter().enumerate() {
                table[reads[1][i / hidden] as usize * hidden + i % hidden] += dy;
            }
            vec![added(0, table)]
        }
        Kernel::Narrow { .. } => vec![reads[0].clone()],
        Kernel::Prepend { batch, positions, features } => {
            let value = |[b, p, f]: [usize; 3]| match p {
                0 => reads[1][f],
                p => reads[0][(b * positions + p - 1) * features + f],
            };
            vec![index3([batch, positions + 1, features]).map(value).collect()]
        }
        Kernel::PrependInputGradient { batch, positions, features } => {
            let value = |[b, p, f]: [usize; 3]| reads[0][(b * (positions + 1) + p + 1) * features + f];
            vec![index3([batch, positions, features]).map(value).collect()]
        }
        Kernel::PrependWeightGradient { batch, positions, features } => {
            let sum = |f: usize| (0..batch).map(|b| reads[0][b * (positions + 1) * features + f]).sum();
            vec![added(0, (0..features).map(sum).collect())]
        }
        Kernel::First { batch, positions, features } => {
            vec![index3([batch, 1, features]).map(|[b, _, f]| reads[0][b * positions * features + f]).collect()]
        }
        Kernel::FirstGradient { batch, positions, features } => {
            let value = |[b, p, f]: [usize; 3]| if p == 0 { reads[0][b * features + f] } else { 0.0 };
            vec![index3([batch, positions, features]).map(value).collect()]
        }
        Kernel::Split { rows, parts, columns } => {
            let part = |p: usize| index3([rows, 1, columns]).map(|[r, _, c]| reads[0][(r * parts + p) * columns + c]).collect();
            (0..parts).map(part).collect()
        }
        Kernel::Join { rows, parts, columns } => {
            vec![index3([rows, parts, columns]).map(|[r, p, c]| reads[p][r * columns + c]).collect()]
        }
        Kernel::Slice { outer, parts, inner } => {
            vec![index3([outer, 1, inner]).map(|[o, _, i]| reads[0][(o * parts + group_index) * inner + i]).collect()]
        }
        Kernel::Interleave { outer, parts, inner } => {
            vec![index3([outer, parts, inner]).map(|[o, p, i]| reads[0][(p * outer + o) * inner + i]).collect()]
        }
        Kernel::Deinterleave { outer, parts, inner } => {
            vec![index3([parts, outer, inner]).map(|[p, o, i]| reads[0][(o * parts + p) * inner + i]).collect()]
        }
        Kernel::TakeColumns { rows, columns, start, part } => {
            vec![index3([rows, part, 1]).map(|[row, column, _]| reads[0][row * columns + start + column]).collect()]
        }
        Kernel::PutColumns { rows, columns, start, part } => {
            let value = |[row, column, _]: [usize; 3]| match column.checked_sub(start).filter(|&place| place < part) {
                Some(place) => reads[0][row * part + place],
                None => before[0][row * columns + column],
            };
            vec![index3([rows, columns, 1]).map(value).collect()]
        }
        _ => return None,
    })
}
