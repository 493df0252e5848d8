"""The names of number formats in tables, and their widths in bytes."""

WIDTHS = {"f32": 4, "bf16": 2, "f16": 2, "f64": 8, "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "bool": 1, "f8": 1, "c64": 8}
