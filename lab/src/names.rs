//! The names of a lab's parts, by which all parts are found again.

/// The beginning of the names of all labs' namespaces and control groups.
pub const PREFIX: &str = "foretell-lab_";

/// The beginning of the names of one lab's namespaces.
pub(crate) fn namespace_prefix(id: &str) -> String {
    format!("{PREFIX}{id}_")
}

/// The namespace of a lab's switches.
pub(crate) fn switches_namespace(id: &str) -> String {
    format!("{}switches", namespace_prefix(id))
}

/// The namespace of a lab's node.
pub(crate) fn node_namespace(id: &str, node: &str) -> String {
    format!("{}node-{}", namespace_prefix(id), identifier(node))
}

/// The id of the lab that a namespace belongs to; `None` for other namespaces.
pub(crate) fn lab_of_namespace(namespace: &str) -> Option<&str> {
    Some(namespace.strip_prefix(PREFIX)?.split_once('_')?.0)
}

/// Turns a name into one that may be part of a namespace's name. It never contains `_`, which
/// separates the parts.
pub(crate) fn identifier(name: &str) -> String {
    name.chars().map(|letter| if letter.is_ascii_alphanumeric() || "-.~".contains(letter) { letter } else { '-' }).collect()
}
