//! Ring collectives step by step: the hops between members and the links that they use.
//!
//! In every step each member sends a part to the next and receives one from its predecessor. This
//! module must not know when steps happen.

use super::orders::ring_orders;
use super::rotation::MeshRotation;
use super::shape::{FlowContext, Shape};
use foretell_program::{Collective, Rank};
use foretell_topologies::{DeviceId, TopologyError};
use foretell_units::Seconds;

/// How collectives are simulated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Collectives {
    /// One flow over all links of the algorithm, which starts when the last member is ready. The
    /// number of events does not grow with the number of members.
    #[default]
    Flow,
    /// All-reduce, reduce-scatter and all-gather run around rings, and other collectives as flows.
    /// Every step of every member is a message. It waits for the member's previous step and for the
    /// message from its predecessor.
    Steps,
}

/// The link of a ring between a member and the next.
#[derive(Clone, Debug)]
pub(crate) struct Hop {
    /// Index of its group in [`crate::lowering::Lowered::groups`].
    pub(crate) group: u32,
    /// Indices of the simulated ranks at both ends.
    pub(crate) sender: u32,
    pub(crate) receiver: u32,
    /// Indices of the previous and the next hop of the ring.
    pub(crate) before: u32,
    pub(crate) after: u32,
    pub(crate) shape: Shape,
    /// How many hops of the whole ring this one stands for: counted at the sender, and at the
    /// receiver. Both are 1 until equivalent ranks are folded.
    pub(crate) weights: [f64; 2],
}

/// Returns whether a collective runs around a ring.
pub(crate) fn is_ring_collective(collective: Collective) -> bool {
    matches!(collective, Collective::AllReduce | Collective::ReduceScatter | Collective::AllGather)
}

/// Returns the number of steps of a ring collective.
pub(crate) fn steps(collective: Collective, members: usize) -> u32 {
    let once = members as u32 - 1;
    if collective == Collective::AllReduce { 2 * once } else { once }
}

/// Returns the hops of a group's rings and the number of rings. Hop indices start at `first`.
/// `index_of` maps a rank to its simulated rank. With a rotation, these are the representatives'
/// hops. Returns `None` if the rotation does not map every ring onto itself, or if two links of one
/// hop share a representative.
pub(crate) fn hops(
    context: FlowContext<'_>,
    group: u32,
    members: &[(Rank, DeviceId)],
    index_of: impl Fn(Rank) -> u32,
    first: u32,
) -> Result<Option<(Vec<Hop>, u32)>, TopologyError> {
    let devices: Vec<DeviceId> = members.iter().map(|&(_, device)| device).collect();
    let orders = ring_orders(context.topology, &devices);
    let mut hops: Vec<Hop> = Vec::new();
    for order in &orders {
        let ring: Vec<Rank> = order.iter().map(|&member| members[member].0).collect();
        let Some(represented_by) = representative_positions(context.rotation, &ring) else { return Ok(None) };
        let kept = || (0..ring.len()).filter(|&position| represented_by[position] == position);
        let mut number_at = vec![0; ring.len()];
        (first + hops.len() as u32..).zip(kept()).for_each(|(number, position)| number_at[position] = number);
        let number_of = |position: usize| number_at[represented_by[position % ring.len()]];
        for position in kept() {
            let [from, to] = [position, (position + 1) % ring.len()];
            let Some(shape) = Shape::point_to_point(context, devices[order[from]], devices[order[to]])? else { return Ok(None) };
            hops.push(Hop {
                group,
                sender: index_of(ring[from]),
                receiver: index_of(ring[to]),
                before: number_of(position + ring.len() - 1),
                after: number_of(position + 1),
                shape,
                weights: [1.0; 2],
            });
        }
    }
    Ok(Some((hops, orders.len() as u32)))
}

/// Returns, for each position of a ring, the position of its representative: the one whose outgoing
/// hop stands for this position's. `None` if the rotation does not map the ring onto itself.
fn representative_positions(rotation: Option<&MeshRotation>, ring: &[Rank]) -> Option<Vec<usize>> {
    let Some(rotation) = rotation else { return Some((0..ring.len()).collect()) };
    // For each rank: the index of its representative, and the number of rotations from the
    // representative to the rank.
    let rotated: Vec<(usize, usize)> = ring.iter().map(|rank| rotation.index_and_rotations(rank.0)).collect();
    let places = rotated.iter().map(|&(place, _)| place + 1).max().unwrap_or(0);
    let mut position_of = vec![None; places];
    for (position, &(place, rotations)) in rotated.iter().enumerate() {
        if rotations == 0 {
            position_of[place] = Some(position);
        }
    }
    let after = |position: usize| rotated[if position + 1 < rotated.len() { position + 1 } else { 0 }];
    let count = rotation.period();
    let mut represented_by = Vec::with_capacity(rotated.len());
    for (position, &(place, rotations)) in rotated.iter().enumerate() {
        let representative = position_of[place]?;
        // The rotation maps a ring onto itself only if it takes the representative's successor to
        // this rank's successor.
        let (next_of_first, successor_rotations) = after(representative);
        let sum = successor_rotations + rotations;
        let expected = if sum < count { sum } else { sum - count };
        if after(position) != (next_of_first, expected) {
            return None;
        }
        represented_by.push(representative);
    }
    Some(represented_by)
}

/// Sets the latency and the seconds per byte of every hop, fitted to step durations that the cost
/// model derives from whole collectives.
///
/// `steps` has pairs of a step's bytes and its uncontended seconds. The fit minimises the squared
/// relative errors.
/// These durations include the protocol (NCCL's LL has low latency and a quarter of the rate), the
/// links' efficiency and ranks waiting for each other. Hops still share links, at that rate.
pub(crate) fn set_step_costs(hops: &mut [Hop], steps: &[(f64, f64)]) {
    let Some((latency, seconds_per_byte)) = line(steps) else { return };
    for hop in hops {
        hop.shape.hop_latency = Seconds::new(latency);
        hop.shape.seconds_per_byte = seconds_per_byte;
    }
}

/// Fits a line to points with positive ordinates by least squares of the relative errors. Returns
/// the intercept and the slope, both at least zero.
fn line(points: &[(f64, f64)]) -> Option<(f64, f64)> {
    let points = || points.iter().filter(|(bytes, seconds)| *bytes > 0.0 && *seconds > 0.0);
    let sum = |of: &dyn Fn(f64, f64) -> f64| points().map(|&(bytes, seconds)| of(bytes / seconds, 1.0 / seconds)).sum::<f64>();
    // The normal equations of the errors `w latency + x seconds_per_byte - 1`.
    let (sum_xx, sum_ww) = (sum(&|x, _| x * x), sum(&|_, w| w * w));
    let (sum_xw, sum_x, sum_w) = (sum(&|x, w| x * w), sum(&|x, _| x), sum(&|_, w| w));
    if sum_ww == 0.0 {
        return None;
    }
    let determinant = sum_xx * sum_ww - sum_xw * sum_xw;
    let (latency, seconds_per_byte) = if determinant > 1e-9 * sum_xx * sum_ww {
        ((sum_w * sum_xx - sum_x * sum_xw) / determinant, (sum_x * sum_ww - sum_w * sum_xw) / determinant)
    } else {
        // With only one size, the latency and the time per byte cannot be separated: all of the
        // time counts as time per byte.
        (0.0, sum_x / sum_xx)
    };
    Some(match (latency < 0.0, seconds_per_byte < 0.0) {
        (true, _) => (0.0, sum_x / sum_xx),
        (_, true) => (sum_w / sum_ww, 0.0),
        _ => (latency, seconds_per_byte),
    })
}

#[cfg(test)]
mod tests {
    use super::{line, representative_positions};
    use crate::network::MeshRotation;
    use foretell_program::Rank;

    #[test]
    fn a_rotation_is_a_symmetry_of_rings_with_one_stride() {
        let positions = |ring: [usize; 4]| representative_positions(Some(&MeshRotation::of_blocks(1, 4)), &ring.map(Rank));
        assert_eq!(positions([0, 1, 2, 3]), Some(vec![0; 4]));
        assert_eq!(positions([3, 2, 1, 0]), Some(vec![3; 4]));
        // Rank 0 sends to rank 2 but rank 2 to rank 3.
        assert_eq!(positions([0, 2, 3, 1]), None);
    }

    #[test]
    fn two_sizes_fit_exactly_and_three_within_a_tenth() {
        let (latency, rate) = line(&[(1e3, 2e-6), (1e6, 1.1e-5)]).expect("points");
        assert!((latency + 1e3 * rate - 2e-6).abs() < 1e-12 && (latency + 1e6 * rate - 1.1e-5).abs() < 1e-12);
        let (latency, rate) = line(&[(1e3, 2e-6), (1e4, 2.2e-6), (1e6, 1.1e-5)]).expect("points");
        assert!([(1e3, 2e-6), (1e4, 2.2e-6), (1e6, 1.1e-5)].iter().all(|(x, y)| ((latency + x * rate) / y - 1.0).abs() < 0.1));
    }

    #[test]
    fn a_fit_to_one_size_has_no_latency_and_no_fit_is_negative() {
        let (latency, rate) = line(&[(1e6, 1e-5)]).expect("a point");
        assert!(latency == 0.0 && (rate / 1e-11 - 1.0).abs() < 1e-12, "{latency} {rate}");
        assert!(line(&[(1e3, 1e-9), (1e6, 1e-5)]).is_some_and(|(latency, rate)| latency == 0.0 && rate > 0.0));
        assert!(line(&[(1e3, 2e-5), (1e6, 1e-5)]).is_some_and(|(latency, rate)| latency > 0.0 && rate == 0.0));
        assert_eq!(line(&[]), None);
        assert_eq!(line(&[(0.0, 1e-5)]), None);
    }
}
