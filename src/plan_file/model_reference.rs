//! How a plan file states its model.

use crate::inputs;
use foretell_models::Model;
use foretell_units::diagnostic::Mistake;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use std::borrow::Cow;
use std::fmt;

/// A model by name, by path, or in place.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant, reason = "a plan has one")]
pub enum ModelReference {
    /// A zoo name or a path.
    Named(String),
    /// Written in place.
    InPlace(Model),
}

impl Serialize for ModelReference {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            ModelReference::Named(name) => serializer.serialize_str(name),
            ModelReference::InPlace(model) => model.serialize(serializer),
        }
    }
}

impl JsonSchema for ModelReference {
    fn schema_name() -> Cow<'static, str> {
        "ModelReference".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let based = json_schema!({
            "description": "A model of the library with other sizes: its name, and the fields that differ.",
            "type": "object", "properties": {"base": {"type": "string"}}, "required": ["base"], "additionalProperties": true
        });
        json_schema!({"anyOf": [{"type": "string"}, based, generator.subschema_for::<Model>()]})
    }

    fn inline_schema() -> bool {
        true
    }
}

impl<'de> Deserialize<'de> for ModelReference {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Visitor;

        impl<'de> de::Visitor<'de> for Visitor {
            type Value = ModelReference;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a model's name, the path of a model file, or a mapping with `family` or `base`")
            }

            fn visit_str<E: de::Error>(self, name: &str) -> Result<ModelReference, E> {
                Ok(ModelReference::Named(name.into()))
            }

            fn visit_map<A: de::MapAccess<'de>>(self, map: A) -> Result<ModelReference, A::Error> {
                let mut sizes = serde_json::Map::deserialize(de::value::MapAccessDeserializer::new(map))?;
                let model = match sizes.remove("base") {
                    Some(base) => inputs::based(&base, sizes).map_err(Mistake::into_serde),
                    None => Model::deserialize(serde_json::Value::Object(sizes)).map_err(A::Error::custom),
                };
                model.map(ModelReference::InPlace)
            }
        }

        deserializer.deserialize_any(Visitor)
    }
}
