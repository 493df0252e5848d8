//! Links that can never be full, whatever goes on at once: nobody is slowed there, so nobody has to be asked who is on them.
//!
//! One group or channel runs one exchange at a time, and that takes at most all of a link: a link that only one uses is never too small. And what
//! passes a link has passed the one before it on its route: a link that carries as much as all those together is never too small either, as
//! the uplinks of a fat tree that is not oversubscribed; nor is one that carries as much as all those that follow it.
//! It must not know when exchanges happen.

use crate::network::{END, Turn};
use std::collections::{BTreeMap, BTreeSet};

/// Of the links that parties load, those that may be full: `parties` has each party's links, `turns` every pair of links that some route takes
/// one after the other, [`END`] standing before the first and after the last. Those of which `always` says so stay.
pub(crate) fn links_that_may_be_full<'a>(
    parties: impl Iterator<Item = Vec<usize>>,
    turns: impl Iterator<Item = &'a Turn>,
    capacity: impl Fn(usize) -> f64,
    always: impl Fn(usize) -> bool,
) -> BTreeSet<usize> {
    let mut users: BTreeMap<usize, u32> = BTreeMap::new();
    for links in parties {
        for link in links.into_iter().collect::<BTreeSet<_>>() {
            *users.entry(link).or_default() += 1;
        }
    }
    let mut turns: Vec<Turn> = turns.copied().collect();
    turns.sort_unstable();
    turns.dedup();
    let mut after = turns.clone();
    after.sort_unstable_by_key(|turn| (turn.to, turn.from));
    // Why a link is left out. One that is left out for those before it counts on these, and those on the ones before them; so nobody may count on
    // it for the other direction, or two would count on each other.
    let mut why: BTreeMap<usize, Why> = BTreeMap::new();
    for (&link, &count) in &users {
        if count == 1 && !always(link) {
            why.insert(link, Why::OneUser);
        }
    }
    let directions = [(&after, Why::Before), (&turns, Why::After)];
    for (turns, reason) in directions {
        let is_after = reason == Why::After;
        let own = |turn: &Turn| if is_after { turn.from } else { turn.to };
        let neighbour = |turn: &Turn| if is_after { turn.to } else { turn.from };
        for around in turns.chunk_by(|one, other| own(one) == own(other)) {
            let Some(link) = around.first().map(own).filter(|link| *link != END && !why.contains_key(link)) else { continue };
            let opposite = if is_after { Why::Before } else { Why::After };
            let counts = |turn: &Turn| neighbour(turn) != END && why.get(&neighbour(turn)) != Some(&opposite);
            let total: f64 = around.iter().map(neighbour).filter(|link| *link != END).map(&capacity).sum();
            if !always(link) && around.iter().all(counts) && total <= capacity(link) * (1.0 + SAME) {
                why.insert(link, reason);
            }
        }
    }
    users.into_keys().filter(|link| !why.contains_key(link)).collect()
}

/// Capacities that differ by less than this share are the same, but for the rounding of their sums.
const SAME: f64 = 1e-9;

/// Why a link cannot be full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Why {
    OneUser,
    /// Those before it, or after it, on every route let no more through.
    Before,
    After,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn may_be_full(parties: &[&[usize]], capacities: &[f64]) -> Vec<usize> {
        let turns: Vec<Turn> = parties.iter().flat_map(|route| Turn::of_route(route.iter().copied())).collect();
        let links = parties.iter().map(|route| route.to_vec());
        links_that_may_be_full(links, turns.iter(), |link| capacities[link], |_| false).into_iter().collect()
    }

    #[test]
    fn a_link_of_one_user_is_never_full() {
        assert_eq!(may_be_full(&[&[0, 1]], &[1.0, 1.0]), []);
        assert_eq!(may_be_full(&[&[0, 1], &[0, 2]], &[1.0, 1.0, 1.0]), [0]);
    }

    #[test]
    fn an_uplink_as_wide_as_all_before_it_is_never_full() {
        // Ports 0 and 1 with two users each lead to uplink 2.
        let routes: [&[usize]; 4] = [&[0, 2, 3], &[0, 2, 4], &[1, 2, 3], &[1, 2, 4]];
        assert_eq!(may_be_full(&routes, &[1.0, 1.0, 2.0, 1.0, 1.0]), [0, 1, 3, 4]);
        assert_eq!(may_be_full(&routes, &[1.0, 1.0, 1.5, 1.0, 1.0]), [0, 1, 2, 3, 4]);
        // Where one begins at the uplink itself, the ports say nothing of it.
        let routes: [&[usize]; 5] = [&[0, 2, 3], &[0, 2, 4], &[1, 2, 3], &[1, 2, 4], &[2, 5]];
        assert!(may_be_full(&routes, &[1.0, 1.0, 2.0, 1.0, 1.0, 1.0]).contains(&2));
    }

    #[test]
    fn two_links_do_not_count_on_each_other() {
        // Two users on the same two links: one of the links must stay.
        assert_eq!(may_be_full(&[&[0, 1], &[0, 1]], &[1.0, 1.0]), [0]);
        assert_eq!(may_be_full(&[&[0, 1, 2], &[0, 1, 2]], &[1.0, 1.0, 1.0]), [0]);
        assert_eq!(may_be_full(&[&[0, 1, 2], &[0, 1, 2]], &[3.0, 2.0, 1.0]), [2]);
    }
}
