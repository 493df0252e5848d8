//! Writes the part of Protocol Buffers' wire format that traces need: varints, doubles, texts,
//! packed lists, nested messages, and files of messages that are each preceded by their length. It
//! knows no schema. <https://protobuf.dev/programming-guides/encoding>

/// A message under construction, field by field.
#[derive(Debug, Default)]
pub(crate) struct Message(Vec<u8>);

/// How a field's bytes are delimited.
#[derive(Clone, Copy)]
enum WireType {
    Varint = 0,
    Fixed64 = 1,
    Length = 2,
}

impl Message {
    /// Writes a number, also if it is 0, as members of a `oneof` require.
    pub(crate) fn number(mut self, field: u32, value: u64) -> Self {
        self.tag(field, WireType::Varint);
        varint(&mut self.0, value);
        self
    }

    /// Writes a number unless it is 0, the default that readers assume.
    pub(crate) fn number_unless_zero(self, field: u32, value: u64) -> Self {
        if value == 0 { self } else { self.number(field, value) }
    }

    /// Writes a double, also if it is 0.
    pub(crate) fn double(mut self, field: u32, value: f64) -> Self {
        self.tag(field, WireType::Fixed64);
        self.0.extend_from_slice(&value.to_le_bytes());
        self
    }

    /// Writes a text, also if it is empty.
    pub(crate) fn text(self, field: u32, value: &str) -> Self {
        self.bytes(field, value.as_bytes())
    }

    /// Writes a packed list of numbers unless it is empty.
    pub(crate) fn numbers(self, field: u32, values: &[u64]) -> Self {
        if values.is_empty() {
            return self;
        }
        let mut packed = Vec::with_capacity(values.len());
        values.iter().for_each(|&value| varint(&mut packed, value));
        self.bytes(field, &packed)
    }

    /// Writes a nested message.
    pub(crate) fn message(self, field: u32, message: Message) -> Self {
        self.bytes(field, &message.0)
    }

    /// Appends the message to a file, preceded by its length.
    pub(crate) fn write_delimited(self, file: &mut Vec<u8>) {
        varint(file, self.0.len() as u64);
        file.extend_from_slice(&self.0);
    }

    fn bytes(mut self, field: u32, bytes: &[u8]) -> Self {
        self.tag(field, WireType::Length);
        varint(&mut self.0, bytes.len() as u64);
        self.0.extend_from_slice(bytes);
        self
    }

    fn tag(&mut self, field: u32, wire_type: WireType) {
        varint(&mut self.0, u64::from(field) << 3 | wire_type as u64);
    }
}

/// Writes seven bits per byte, lowest first. The eighth bit means that more bytes follow.
fn varint(into: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        into.push(value as u8 | 0x80);
        value >>= 7;
    }
    into.push(value as u8);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The examples are those of the format's documentation.
    #[test]
    fn messages_are_encoded_as_in_the_documentation() {
        assert_eq!(Message::default().number(1, 150).0, [0x08, 0x96, 0x01]);
        assert_eq!(Message::default().text(2, "testing").0, [0x12, 0x07, 0x74, 0x65, 0x73, 0x74, 0x69, 0x6e, 0x67]);
        assert_eq!(Message::default().numbers(6, &[3, 270, 86942]).0, [0x32, 0x06, 0x03, 0x8e, 0x02, 0x9e, 0xa7, 0x05]);
        assert_eq!(Message::default().message(3, Message::default().number(1, 150)).0, [0x1a, 0x03, 0x08, 0x96, 0x01]);
        assert_eq!(Message::default().number_unless_zero(1, 0).numbers(2, &[]).0, [0u8; 0]);
    }

    #[test]
    fn a_length_above_127_takes_two_bytes() {
        let mut file = Vec::new();
        Message::default().text(1, &"a".repeat(200)).write_delimited(&mut file);
        assert_eq!(file[..5], [0xcb, 0x01, 0x0a, 0xc8, 0x01]);
        assert_eq!(file.len(), 2 + 203);
    }
}
