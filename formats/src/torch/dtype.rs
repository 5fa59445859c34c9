//! Element types by torch's names and how a checkpoint stores them.

/// How a checkpoint stores a torch element type.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stored {
    /// torch's name, without `torch.`.
    pub torch: &'static str,
    /// Name in the table of chunks: safetensors', or `U8` for types that it cannot name.
    pub name: &'static str,
    /// Bytes of an element.
    pub bytes: u64,
    /// Whether the elements are stored as bytes, one more dimension if an element has several.
    pub as_bytes: bool,
}

const fn named(torch: &'static str, name: &'static str, bytes: u64) -> Stored {
    Stored { torch, name, bytes, as_bytes: false }
}

const fn opaque(torch: &'static str, bytes: u64) -> Stored {
    Stored { torch, name: "U8", bytes, as_bytes: true }
}

const TABLE: [Stored; 22] = [
    named("bool", "BOOL", 1),
    named("uint8", "U8", 1),
    named("int8", "I8", 1),
    named("uint16", "U16", 2),
    named("int16", "I16", 2),
    named("uint32", "U32", 4),
    named("int32", "I32", 4),
    named("uint64", "U64", 8),
    named("int64", "I64", 8),
    named("float16", "F16", 2),
    named("bfloat16", "BF16", 2),
    named("float32", "F32", 4),
    named("float64", "F64", 8),
    named("complex64", "C64", 8),
    named("complex128", "C128", 16),
    named("float8_e4m3fn", "F8_E4M3", 1),
    named("float8_e5m2", "F8_E5M2", 1),
    named("float8_e8m0fnu", "F8_E8M0", 1),
    opaque("complex32", 4),
    opaque("float8_e4m3fnuz", 1),
    opaque("float8_e5m2fnuz", 1),
    opaque("float4_e2m1fn_x2", 1),
];

/// The form of a torch dtype's name.
pub fn stored(torch: &str) -> Option<Stored> {
    TABLE.iter().find(|row| row.torch == torch).copied()
}

/// The torch dtype of a storage class; the raw class holds bytes.
pub fn storage_dtype(class: &str) -> Option<&'static str> {
    Some(match class {
        "FloatStorage" => "float32",
        "DoubleStorage" => "float64",
        "HalfStorage" => "float16",
        "BFloat16Storage" => "bfloat16",
        "LongStorage" => "int64",
        "IntStorage" => "int32",
        "ShortStorage" => "int16",
        "CharStorage" => "int8",
        "ByteStorage" | "UntypedStorage" => "uint8",
        "BoolStorage" => "bool",
        "ComplexFloatStorage" => "complex64",
        "ComplexDoubleStorage" => "complex128",
        _ => return None,
    })
}

/// The torch dtype that a checkpoint stores under a name.
pub fn torch_of(name: &str) -> Option<&'static str> {
    match name {
        // Stored under their own names by other writers of this layout.
        "F8_E4M3FNUZ" => Some("float8_e4m3fnuz"),
        "F8_E5M2FNUZ" => Some("float8_e5m2fnuz"),
        _ => TABLE.iter().find(|row| row.name == name && !row.as_bytes).map(|row| row.torch),
    }
}
