//! Clusters: nodes, devices, links, switches and routes.
