//! Tori and meshes of devices (Dally and Seitz 1986; TPU v4, Jouppi et al. 2023): each device has a
//! link in each direction to its two neighbours in each dimension.

use super::routing::{Choice, Routing};
use super::{End, NodePorts};
use crate::link::{Junction, Link, LinkClass, LinkId, NewLinks};
use foretell_units::{BytesPerSecond, Seconds};

/// A grid of devices in the order of their indices. The last dimension varies fastest.
#[derive(Debug, Clone, PartialEq)]
pub struct Torus {
    /// Sizes of the dimensions.
    pub dimensions: Dimensions,
    /// Rate of a link, one way.
    pub bandwidth: BytesPerSecond,
    /// Whether the ends of each row are joined. The ends of a row of two never are: its devices
    /// would be neighbours twice.
    pub wraps_around: bool,
}

/// Sizes of a torus's dimensions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Dimensions {
    /// Stated sizes, whose product is the number of devices.
    Sizes(Vec<usize>),
    /// A number of dimensions, whose sizes are as equal as the number of devices allows.
    Count(usize),
}

impl Torus {
    /// Returns the size of each dimension for a number of devices.
    pub fn sizes(&self, devices: usize) -> Vec<usize> {
        match &self.dimensions {
            Dimensions::Sizes(sizes) => sizes.clone(),
            Dimensions::Count(count) => near_equal_factors(devices, *count),
        }
    }

    pub(super) fn fits(&self, devices: usize) -> Result<(), (String, String)> {
        let Dimensions::Sizes(sizes) = &self.dimensions else { return Ok(()) };
        let product = sizes.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
        if product == Some(devices) {
            return Ok(());
        }
        let text = sizes.iter().map(usize::to_string).collect::<Vec<_>>();
        Err((
            format!("a torus of {} does not hold {devices} devices", text.join(" x ")),
            format!(
                "write `dimensions` whose product is {devices}, or only how many there are, such as `dimensions: {}`",
                text.len()
            ),
        ))
    }
}

/// Splits `number` into `count` factors. Each factor is the largest divisor of the remaining
/// quotient that does not exceed its `n`-th root, where `n` factors remain.
fn near_equal_factors(number: usize, count: usize) -> Vec<usize> {
    let mut left = number.max(1);
    let mut sizes = Vec::with_capacity(count);
    for remaining in (1..=count.max(1)).rev() {
        let is_below_root = |size: &usize| size.checked_pow(remaining as u32).is_some_and(|power| power <= left);
        let size = (1..=left).take_while(is_below_root).filter(|size| left.is_multiple_of(*size)).last();
        let size = size.expect("invariant: 1 divides every number");
        sizes.push(size);
        left /= size;
    }
    sizes
}

/// A torus with numbered links. Links are numbered by dimension, row, and edge along the row; of
/// each edge the upward direction comes first.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct TorusLayout {
    dimensions: Vec<Dimension>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Dimension {
    size: usize,
    /// Difference between the indices of neighbours in this dimension.
    stride: usize,
    /// Edges of a row: as many as devices if the row wraps around, else one fewer.
    edges: usize,
    first_link: usize,
}

/// A path along one dimension: the number of hops, and its direction.
#[derive(Debug, Clone, Copy)]
struct Way {
    hops: usize,
    is_upward: bool,
}

impl TorusLayout {
    pub(super) fn new(torus: &Torus, latency: Seconds, nodes: &[NodePorts], links: &mut NewLinks) -> Self {
        let devices = nodes.last().map_or(0, |node| node.devices.end);
        let sizes = torus.sizes(devices);
        let mut dimensions = Vec::with_capacity(sizes.len());
        for (number, &size) in sizes.iter().enumerate() {
            let is_closed = torus.wraps_around && size > 2;
            let dimension = Dimension {
                size,
                stride: sizes[number + 1..].iter().product(),
                edges: if is_closed { size } else { size - 1 },
                first_link: links.next(),
            };
            for row in 0..devices / size {
                for edge in 0..dimension.edges {
                    let ends = [edge, (edge + 1) % size].map(|place| dimension.device(row, place));
                    for (from, to) in [(ends[0], ends[1]), (ends[1], ends[0])] {
                        let name = format!("dimension-{number}/device-{from}/to-{to}");
                        let (from, to) = (Junction::Device(from), Junction::Device(to));
                        links.push(Link { name, class: LinkClass::Nic, bandwidth: torus.bandwidth, latency, from, to });
                    }
                }
            }
            dimensions.push(dimension);
        }
        TorusLayout { dimensions }
    }

    pub(super) fn path(&self, from: End, to: End, routing: Routing, choice: Choice, links: &mut Vec<LinkId>) {
        if routing == Routing::Ecmp {
            return self.any_order(from.device, to.device, choice, links);
        }
        let mut at = from.device;
        for dimension in &self.dimensions {
            // If both directions are equally long, even positions go upward and odd positions
            // downward, so that both are used.
            let way = dimension.way(at, to.device, dimension.place(at).is_multiple_of(2));
            for _ in 0..way.hops {
                at = dimension.step(at, way.is_upward, links);
            }
        }
    }

    /// Chooses the dimension of each hop with a probability proportional to the remaining hops in
    /// it, so that all shortest paths are equally likely.
    fn any_order(&self, from: usize, to: usize, choice: Choice, links: &mut Vec<LinkId>) {
        let mut choice = choice;
        let mut ways = Vec::with_capacity(self.dimensions.len());
        for dimension in &self.dimensions {
            choice = choice.next();
            ways.push(dimension.way(from, to, choice.among(2) == 0));
        }
        let mut at = from;
        loop {
            let left: usize = ways.iter().map(|way| way.hops).sum();
            if left == 0 {
                return;
            }
            choice = choice.next();
            let mut drawn = choice.among(left);
            for (dimension, way) in self.dimensions.iter().zip(&mut ways) {
                if drawn < way.hops {
                    way.hops -= 1;
                    at = dimension.step(at, way.is_upward, links);
                    break;
                }
                drawn -= way.hops;
            }
        }
    }

    pub(super) fn equal_paths(&self, from: End, to: End, routing: Routing) -> u64 {
        if routing != Routing::Ecmp {
            return 1;
        }
        let (mut paths, mut hops) = (1u64, 0u64);
        for dimension in &self.dimensions {
            let way = dimension.way(from.device, to.device, true);
            if way.hops > 0 && 2 * way.hops == dimension.edges {
                paths = paths.saturating_mul(2);
            }
            // Number of ways to interleave this dimension's hops with those of the previous
            // dimensions: a binomial coefficient.
            let mut orders = 1u128;
            for hop in 1..=way.hops as u64 {
                orders = orders.saturating_mul(u128::from(hops + hop)) / u128::from(hop);
            }
            hops += way.hops as u64;
            paths = paths.saturating_mul(u64::try_from(orders).unwrap_or(u64::MAX));
        }
        paths
    }
}

impl Dimension {
    fn place(&self, device: usize) -> usize {
        device / self.stride % self.size
    }

    /// Row of a device: its index if this dimension is removed.
    fn row(&self, device: usize) -> usize {
        device / (self.stride * self.size) * self.stride + device % self.stride
    }

    fn device(&self, row: usize, place: usize) -> usize {
        (row / self.stride * self.size + place) * self.stride + row % self.stride
    }

    /// The shorter direction between two positions. If both are equally long, `is_upward_if_equal`
    /// decides.
    fn way(&self, from: usize, to: usize, is_upward_if_equal: bool) -> Way {
        let (from, to) = (self.place(from), self.place(to));
        if self.edges < self.size {
            return Way { hops: from.abs_diff(to), is_upward: to > from };
        }
        let up = (to + self.size - from) % self.size;
        let down = self.size - up;
        match up.cmp(&down) {
            std::cmp::Ordering::Less => Way { hops: up, is_upward: true },
            std::cmp::Ordering::Greater => Way { hops: down % self.size, is_upward: false },
            std::cmp::Ordering::Equal => Way { hops: up, is_upward: is_upward_if_equal },
        }
    }

    /// Takes one hop and returns the device at its end.
    fn step(&self, at: usize, is_upward: bool, links: &mut Vec<LinkId>) -> usize {
        let (row, place) = (self.row(at), self.place(at));
        let next = if is_upward { (place + 1) % self.size } else { (place + self.size - 1) % self.size };
        let (edge, way) = if is_upward { (place, 0) } else { (next, 1) };
        links.push(LinkId(self.first_link + 2 * (row * self.edges + edge) + way));
        self.device(row, next)
    }
}

#[cfg(test)]
mod tests {
    use super::near_equal_factors;

    #[test]
    fn factors_are_as_equal_as_the_number_allows() {
        assert_eq!(near_equal_factors(64, 3), [4, 4, 4]);
        assert_eq!(near_equal_factors(100, 3), [4, 5, 5]);
        assert_eq!(near_equal_factors(12, 2), [3, 4]);
        assert_eq!(near_equal_factors(7, 2), [1, 7]);
        assert_eq!(near_equal_factors(1, 3), [1, 1, 1]);
    }
}
