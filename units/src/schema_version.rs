//! The version of the form of a file or document: `schema_version`. It must not know any form.

use crate::diagnostic::Mistake;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::borrow::Cow;

/// The version of the form that a file or document has.
///
/// There is only one version so far, so the type has one value. A file without the field has this
/// version. A file of another version is refused: the same words could have another meaning there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SchemaVersion;

impl SchemaVersion {
    /// The version that this program writes and reads.
    pub const CURRENT: u64 = 1;
}

impl Serialize for SchemaVersion {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(Self::CURRENT)
    }
}

impl<'de> Deserialize<'de> for SchemaVersion {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match u64::deserialize(deserializer)? {
            Self::CURRENT => Ok(Self),
            other => {
                let message = format!("`schema_version` is {other}, and this program reads {}", Self::CURRENT);
                Err(Mistake::new(message, "use the Foretell that wrote the file, or a newer one").into_serde())
            }
        }
    }
}

impl JsonSchema for SchemaVersion {
    fn schema_name() -> Cow<'static, str> {
        "SchemaVersion".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({"const": Self::CURRENT})
    }

    fn inline_schema() -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::SchemaVersion;
    use crate::diagnostic::Mistake;
    use serde::de::value::{Error, U64Deserializer};
    use serde::de::{Deserialize, IntoDeserializer};

    #[test]
    fn only_the_current_version_is_read() {
        let read = |version: u64| {
            let deserializer: U64Deserializer<Error> = version.into_deserializer();
            SchemaVersion::deserialize(deserializer).map_err(|error| error.to_string())
        };
        assert_eq!(read(SchemaVersion::CURRENT), Ok(SchemaVersion));
        for other in [0, SchemaVersion::CURRENT + 1] {
            let error = read(other).expect_err("another version");
            assert!(error.contains(&format!("`schema_version` is {other}")), "{error}");
            assert!(Mistake::recorded(&error).is_some_and(|mistake| mistake.hint.contains("Foretell")));
        }
    }
}
