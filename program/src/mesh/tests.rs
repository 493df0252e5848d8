use super::*;

fn mesh() -> Mesh {
    let size = |axis| match axis {
        Axis::Tensor => 2,
        Axis::Data => 3,
        Axis::Pipeline => 4,
        _ => 1,
    };
    Mesh::new(size, &[Axis::Tensor, Axis::Data]).expect("a valid mesh")
}

#[test]
fn rank_and_coordinates_are_inverse_functions() {
    let mesh = mesh();
    assert_eq!(mesh.world_size(), 24);
    for rank in (0..24).map(Rank) {
        assert_eq!(mesh.rank(mesh.coordinates(rank)), rank);
    }
}

#[test]
fn every_member_of_a_group_sees_the_same_members() {
    let mesh = mesh();
    for group in [Group::along(Axis::Tensor), Group::along(Axis::Data), Group::across(vec![0, 3])] {
        for rank in (0..24).map(Rank) {
            let stage = mesh.coordinates(rank).along(Axis::Pipeline);
            if group.axes == [Axis::Pipeline] && !group.stages.contains(&stage) {
                continue;
            }
            let members = group.members(&mesh, rank);
            assert!(members.contains(&rank));
            for &member in &members {
                assert_eq!(group.members(&mesh, member), members, "every member sees the same group");
            }
        }
    }
}

#[test]
fn part_indices_follow_nested_shards_in_any_rank_order() {
    let size = |axis| match axis {
        Axis::Tensor => 2,
        Axis::Context => 3,
        Axis::Data => 2,
        _ => 1,
    };
    for order in [&[Axis::Tensor, Axis::Context][..], &[Axis::Context, Axis::Data, Axis::Tensor]] {
        let mesh = Mesh::new(size, order).expect("a valid mesh");
        let stage = mesh.stage(0);
        for rank in (0..mesh.world_size()).map(Rank) {
            let coordinates = mesh.coordinates(rank);
            let [tensor, context] = [Axis::Tensor, Axis::Context].map(|axis| coordinates.along(axis));
            assert_eq!(stage.part_along(&[Axis::Tensor, Axis::Context], coordinates), context * 2 + tensor);
            assert_eq!(stage.part_along(&Axis::BATCH, coordinates), stage.samples_before(coordinates));
            for axis in [Axis::Tensor, Axis::Context, Axis::Data] {
                let members = Group::along(axis).members(&mesh, rank);
                let place = members.iter().position(|&member| member == rank);
                assert_eq!(
                    Some(stage.part_along(&[axis], coordinates)),
                    place,
                    "along one axis it is the index among the members"
                );
            }
        }
    }
}

#[test]
fn stages_with_different_meshes_have_consecutive_ranks() {
    let stage = |data, tensor, samples: &[usize]| {
        let size = |axis| match axis {
            Axis::Tensor => tensor,
            Axis::Data => data,
            _ => 1,
        };
        StageMesh::new(size, samples).expect("a valid mesh")
    };
    let stages = vec![stage(3, 1, &[2, 1, 1]), stage(1, 2, &[4]), stage(2, 2, &[2])];
    let mesh = Mesh::of_stages(stages, &[]).expect("a valid mesh");
    assert_eq!(mesh.world_size(), 9);
    for rank in (0..9).map(Rank) {
        assert_eq!(mesh.rank(mesh.coordinates(rank)), rank);
        assert!(mesh.stage_ranks(mesh.stage_of(rank)).contains(&rank));
        assert_eq!(Group::everyone(&mesh).members(&mesh, rank), (0..9).map(Rank).collect::<Vec<_>>());
    }
    assert_eq!(mesh.stage_ranks(1), [Rank(3), Rank(4)]);
    assert_eq!(Group::along(Axis::Data).members(&mesh, Rank(6)), [Rank(6), Rank(8)]);
    let before = |rank| mesh.stage(0).samples_before(mesh.coordinates(Rank(rank)));
    assert_eq!([before(0), before(1), before(2)], [0, 2, 3]);
    assert!((0..3).all(|stage| mesh.stage(stage).samples_at_once() == 4));
    assert!(StageMesh::new(|_| 1, &[2, 2]).is_none(), "one number for each position, or one for all");
}

#[test]
fn stages_lie_at_the_places_that_are_asked_for() {
    let size = |axis| if axis == Axis::Tensor { 2 } else { 1 };
    let stage = |ranks: usize| StageMesh::new(|axis| if axis == Axis::Data { ranks } else { 1 }, &[1]).expect("a valid mesh");
    let uniform = Mesh::uniform(StageMesh::new(size, &[1]).expect("a valid mesh"), 3, &[]).expect("a valid mesh");
    let uneven = Mesh::of_stages(vec![stage(1), stage(2), stage(3)], &[]).expect("a valid mesh");
    for (mesh, first) in [(uniform, [2, 4, 0]), (uneven, [3, 4, 0])] {
        let rotated = mesh.clone().with_stage_places(&[1, 2, 0]).expect("places of all stages");
        assert_eq!(rotated.world_size(), mesh.world_size());
        assert_eq!((0..3).map(|stage| rotated.stage_ranks(stage)[0].0).collect::<Vec<_>>(), first);
        for rank in (0..6).map(Rank) {
            assert_eq!(rotated.rank(rotated.coordinates(rank)), rank);
            assert!(rotated.stage_ranks(rotated.stage_of(rank)).contains(&rank));
        }
        assert_eq!(mesh.clone().with_stage_places(&[0, 1, 2]).as_ref(), Some(&mesh));
        for wrong in [&[0, 1][..], &[0, 1, 1], &[1, 2, 3]] {
            assert!(mesh.clone().with_stage_places(wrong).is_none(), "{wrong:?}");
        }
    }
}

#[test]
fn ranks_along_the_first_axis_of_the_order_are_neighbours() {
    assert_eq!(Group::along(Axis::Tensor).members(&mesh(), Rank(5)), [Rank(4), Rank(5)]);
    assert_eq!(Group::along(Axis::Data).members(&mesh(), Rank(5)), [Rank(1), Rank(3), Rank(5)]);
}

#[test]
fn members_of_a_group_differ_along_its_axes_only() {
    let mesh_in = |order: &[Axis]| {
        let size = |axis| match axis {
            Axis::Tensor | Axis::Pipeline => 2,
            Axis::Context | Axis::Data => 3,
            _ => 1,
        };
        Mesh::new(size, order).expect("a valid mesh")
    };
    let stage = |data: usize| StageMesh::new(|axis| if axis == Axis::Data { data } else { 1 }, &[1]).expect("a valid mesh");
    let meshes = [
        mesh_in(&[]),
        mesh_in(&[Axis::Data, Axis::Tensor]),
        mesh_in(&[Axis::Context, Axis::Data, Axis::Tensor]).with_stage_places(&[1, 0]).expect("places of all stages"),
        Mesh::of_stages(vec![stage(3), stage(3)], &[]).expect("a valid mesh"),
    ];
    let across = |axes: &[Axis]| Group { axes: axes.to_vec(), stages: vec![0, 1] };
    let within = |axes: &[Axis]| Group { axes: axes.to_vec(), stages: Vec::new() };
    let groups = [
        within(&[Axis::Data]),
        within(&[Axis::Tensor, Axis::Context]),
        within(&[Axis::Context, Axis::Data]),
        across(&[Axis::Pipeline]),
        across(&[Axis::Data, Axis::Pipeline]),
    ];
    for (mesh, group) in meshes.iter().flat_map(|mesh| groups.iter().map(move |group| (mesh, group))) {
        let ranks = || (0..mesh.world_size()).map(Rank);
        for rank in ranks() {
            let own = mesh.coordinates(rank);
            let is_member = |&other: &Rank| {
                let theirs = mesh.coordinates(other);
                group.axes.iter().fold(theirs, |position, &axis| position.with(axis, own.along(axis))) == own
            };
            assert_eq!(group.members(mesh, rank), ranks().filter(is_member).collect::<Vec<_>>(), "{group:?} of {rank:?}");
        }
    }
}
