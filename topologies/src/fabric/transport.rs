//! The transport between nodes: RDMA over InfiniBand or Ethernet, a cloud provider's own transport,
//! or TCP.
//!
//! The kind of fabric determines the links. The transport determines how much of a link's rate
//! messages reach and how long a hop takes. The simulator's profiles of networks have these figures
//! by the transport's name.

use foretell_units::Seconds;

/// What carries messages between nodes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Transport {
    /// InfiniBand, the default.
    #[default]
    InfiniBand,
    /// RDMA over Converged Ethernet.
    Roce,
    /// HPE Slingshot through libfabric.
    Slingshot,
    /// Intel's or Cornelis' Omni-Path.
    OmniPath,
    /// AWS's Elastic Fabric Adapter of p4d and p4de.
    Efa1,
    /// AWS's Elastic Fabric Adapter since p5.
    Efa2,
    /// Google's GPUDirect-TCPX (A3 High).
    TcpX,
    /// Google's GPUDirect-TCPXO (A3 Mega).
    TcpXo,
    /// TCP sockets through the host.
    Tcp,
}

impl Transport {
    /// All transports.
    pub const ALL: [Self; 9] = [
        Transport::InfiniBand,
        Transport::Roce,
        Transport::Slingshot,
        Transport::OmniPath,
        Transport::Efa1,
        Transport::Efa2,
        Transport::TcpX,
        Transport::TcpXo,
        Transport::Tcp,
    ];

    /// The name used in topology files and in the simulator's profiles of networks.
    pub const fn name(self) -> &'static str {
        match self {
            Transport::InfiniBand => "infiniband",
            Transport::Roce => "roce",
            Transport::Slingshot => "slingshot",
            Transport::OmniPath => "omni-path",
            Transport::Efa1 => "efa-1",
            Transport::Efa2 => "efa-2",
            Transport::TcpX => "tcpx",
            Transport::TcpXo => "tcpxo",
            Transport::Tcp => "tcp",
        }
    }

    /// Latency between NICs under one switch, if a file states none. TCP sockets go through both
    /// hosts' kernels: the smallest all-reduce of two nodes takes 45 to 50 us
    /// (`collectives_nccl_logs.csv`).
    pub(crate) const fn usual_latency(self) -> Seconds {
        match self {
            Transport::Tcp => Seconds::new(50e-6),
            // GPUDirect-TCPX and TCPXO do not copy data through the hosts.
            Transport::InfiniBand
            | Transport::Roce
            | Transport::Slingshot
            | Transport::OmniPath
            | Transport::Efa1
            | Transport::Efa2
            | Transport::TcpX
            | Transport::TcpXo => super::DEFAULT_NETWORK_LATENCY,
        }
    }
}
