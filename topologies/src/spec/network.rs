//! The schema of `network` in a topology file, and the conversion of a [`Network`] back to it.

use crate::fabric::{Dimensions, Fabric, FatTree, LeafSwitches, Network, Routing, Transport, Uplinks};
use crate::layout::node_name;
use crate::node::NodeGroup;
use crate::text::{At, Scalar, Scalars, written};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Network")]
pub(crate) struct NetworkSpec {
    /// `switch`, `fat-tree`, `rail-optimised`, `torus`, `dragonfly` or `none`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) kind: Option<At<String>>,
    /// The protocol of the NICs, such as `infiniband` or `roce`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) transport: Option<At<String>>,
    /// Rate of a node's port, or of a torus's link, one way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) bandwidth: Option<At<Scalar>>,
    /// Rate of a leaf's nodes over that of its uplinks. A list of two for leaves and pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) oversubscription: Option<At<Scalars>>,
    /// Number of uplinks of a leaf. A list of two for leaves and pods.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) uplinks: Option<At<Scalars>>,
    /// Nodes per leaf switch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) nodes_per_leaf: Option<At<Scalar>>,
    /// Leaf switches per pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) leaves_per_pod: Option<At<Scalar>>,
    /// How data reach another rail: `spine` or `forward`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cross_rail: Option<At<String>>,
    /// Sizes of a torus, or the number of its dimensions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) dimensions: Option<At<Scalars>>,
    /// Whether the ends of a torus's rows are joined.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) wrap_around: Option<At<bool>>,
    /// Nodes per router of a dragonfly.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) nodes_per_router: Option<At<Scalar>>,
    /// Routers per group of a dragonfly.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) routers_per_group: Option<At<Scalar>>,
    /// Links of a router to other groups, in a dragonfly.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) global_links: Option<At<Scalar>>,
    /// Rate of links within a group of a dragonfly, one way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) local_bandwidth: Option<At<Scalar>>,
    /// Rate of links between groups of a dragonfly, one way.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) global_bandwidth: Option<At<Scalar>>,
    /// `spread`, `ecmp`, `dimension-order`, `minimal` or `valiant`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) routing: Option<At<String>>,
    /// Seed of the hash that chooses paths.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) seed: Option<At<Scalar>>,
    /// Latency of an empty message between two NICs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) latency: Option<At<Scalar>>,
    /// Stated paths between pairs of nodes. They override the hash.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) routes: Option<At<Vec<At<RouteSpec>>>>,
}

/// A stated route between two nodes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
#[schemars(rename = "Route")]
pub(crate) struct RouteSpec {
    /// The sending node, such as `node-0`.
    pub(crate) from: At<String>,
    /// The receiving node.
    pub(crate) to: At<String>,
    /// The index of the path.
    pub(crate) path: At<Scalar>,
}

impl NetworkSpec {
    /// Fills the fields that this spec leaves out from `base`. The kind is that of `base`: if this
    /// spec states a kind, the caller does not use `base` at all.
    pub(crate) fn with_defaults_from(self, base: NetworkSpec) -> Self {
        NetworkSpec {
            kind: base.kind,
            transport: self.transport.or(base.transport),
            bandwidth: self.bandwidth.or(base.bandwidth),
            oversubscription: self.oversubscription.or(base.oversubscription),
            uplinks: self.uplinks.or(base.uplinks),
            nodes_per_leaf: self.nodes_per_leaf.or(base.nodes_per_leaf),
            leaves_per_pod: self.leaves_per_pod.or(base.leaves_per_pod),
            cross_rail: self.cross_rail.or(base.cross_rail),
            dimensions: self.dimensions.or(base.dimensions),
            wrap_around: self.wrap_around.or(base.wrap_around),
            nodes_per_router: self.nodes_per_router.or(base.nodes_per_router),
            routers_per_group: self.routers_per_group.or(base.routers_per_group),
            global_links: self.global_links.or(base.global_links),
            local_bandwidth: self.local_bandwidth.or(base.local_bandwidth),
            global_bandwidth: self.global_bandwidth.or(base.global_bandwidth),
            routing: self.routing.or(base.routing),
            seed: self.seed.or(base.seed),
            latency: self.latency.or(base.latency),
            routes: self.routes.or(base.routes),
        }
    }

    /// Returns the spec that describes `network`. Leaves out most fields with default values.
    pub(crate) fn from_network(network: &Network, groups: &[NodeGroup]) -> Self {
        let mut spec = NetworkSpec {
            kind: Some(network.fabric.name().to_owned().into()),
            transport: (network.transport != Transport::default()).then(|| network.transport.name().to_owned().into()),
            latency: Some(written(network.latency)),
            ..NetworkSpec::default()
        };
        match &network.fabric {
            Fabric::None | Fabric::Switch => return spec,
            Fabric::FatTree(tree) => spec.write_tree(tree),
            Fabric::Torus(torus) => {
                spec.dimensions = Some(match &torus.dimensions {
                    Dimensions::Sizes(sizes) => Scalars::list(sizes).into(),
                    Dimensions::Count(count) => Scalars::one(count).into(),
                });
                spec.bandwidth = Some(written(torus.bandwidth));
                spec.wrap_around = Some(torus.wraps_around.into());
            }
            Fabric::Dragonfly(dragonfly) => {
                spec.nodes_per_router = Some(Scalar::from(dragonfly.nodes_per_router).into());
                spec.routers_per_group = Some(Scalar::from(dragonfly.routers_per_group).into());
                spec.global_links = Some(Scalar::from(dragonfly.global_links).into());
                spec.local_bandwidth = Some(written(dragonfly.local_bandwidth));
                spec.global_bandwidth = Some(written(dragonfly.global_bandwidth));
            }
        }
        // A fabric with one path per pair has no routing to write.
        spec.routing =
            (network.routing != Routing::Spread || spec.uplinks.is_some()).then(|| network.routing.name().to_owned().into());
        spec.seed = (network.seed != 0).then(|| Scalar::from(network.seed).into());
        let routes = network.stated.iter().map(|route| {
            let [from, to] = [route.from, route.to].map(|node| name_of(node, groups).into());
            At::from(RouteSpec { from, to, path: Scalar::from(route.path).into() })
        });
        spec.routes = (!network.stated.is_empty()).then(|| routes.collect::<Vec<_>>().into());
        spec
    }

    fn write_tree(&mut self, tree: &FatTree) {
        let levels: Vec<&Uplinks> = [&tree.uplinks].into_iter().chain(tree.pods.as_ref().map(|pods| &pods.uplinks)).collect();
        let factors: Vec<f64> = levels.iter().map(|uplinks| uplinks.oversubscription).collect();
        self.oversubscription = Some(Scalars::one_or_list(&factors).into());
        let counts: Vec<usize> = levels.iter().filter_map(|uplinks| uplinks.count).collect();
        self.uplinks = (counts.len() == levels.len()).then(|| Scalars::one_or_list(&counts).into());
        self.nodes_per_leaf = tree.nodes_per_leaf.map(|nodes| Scalar::from(nodes).into());
        self.leaves_per_pod = tree.pods.map(|pods| Scalar::from(pods.leaves).into());
        if let LeafSwitches::OfRails(cross_rail) = tree.leaf_switches {
            self.cross_rail = Some(cross_rail.name().to_owned().into());
        }
    }
}

/// Returns the name of the node with index `node`.
fn name_of(node: usize, groups: &[NodeGroup]) -> String {
    let mut first = 0;
    for group in groups {
        if node < first + group.count {
            return node_name(group, node - first);
        }
        first += group.count;
    }
    unreachable!("invariant: a node of a network is in a group")
}
