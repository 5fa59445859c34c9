//! The parsers' error: one variant per thing a format demands.

/// Result of the parsers.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What a file violates. Offsets count from the start of the parsed bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The bytes end before the structure does.
    #[error("truncated {what} at byte {offset}: needs {need} bytes, {have} left")]
    Truncated {
        /// The structure being read.
        what: &'static str,
        /// Where it starts.
        offset: u64,
        /// Bytes it needs.
        need: u64,
        /// Bytes that are there.
        have: u64,
    },
    /// A field has a value the format forbids.
    #[error("{what} at byte {offset}: expected {expected}, found {found}")]
    Malformed {
        /// The field.
        what: &'static str,
        /// Its offset.
        offset: u64,
        /// What the format demands.
        expected: String,
        /// What is there.
        found: String,
    },
    /// A count, depth or length passes the reader's limit.
    #[error("{what} at byte {offset}: {found} passes the limit of {limit}")]
    TooLarge {
        /// What is too large.
        what: &'static str,
        /// Where.
        offset: u64,
        /// Its value.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// A name that would leave the root, or that is not text.
    #[error("unsafe name at byte {offset}: expected relative UTF-8 without `..`, found {found}")]
    UnsafeName {
        /// Where.
        offset: u64,
        /// The name, escaped.
        found: String,
    },
    /// Text that is not the JSON it should be.
    #[error("{what}, line {line}, column {column}: {message}")]
    Json {
        /// What was read.
        what: &'static str,
        /// Line, from 1; 0 where unknown.
        line: u64,
        /// Column, from 1; 0 where unknown.
        column: u64,
        /// What the JSON reader says.
        message: String,
    },
    /// A record with a value that the schema forbids.
    #[error("{table}.json: {column} of record {record} must be {expected}, found {found}")]
    BadRecord {
        /// Table of the record.
        table: &'static str,
        /// Column with the value.
        column: &'static str,
        /// Token of the record.
        record: String,
        /// What the schema demands.
        expected: &'static str,
        /// What is there.
        found: String,
    },
    /// A table without which the others mean nothing is not there.
    #[error("table {table}.json is missing")]
    MissingTable {
        /// The table.
        table: &'static str,
    },
    /// A reference to a record that is not there.
    #[error(
        "{table}.json: {column} of record {record} refers to {token}, which is not in {target}.json"
    )]
    Dangling {
        /// Table with the reference.
        table: String,
        /// Column with the reference.
        column: &'static str,
        /// Token of the referring record.
        record: String,
        /// Token referred to.
        token: String,
        /// Table it should be in.
        target: &'static str,
    },
    /// The reader knows this variant and refuses it by name.
    #[error("{what} is not supported")]
    Unsupported {
        /// The variant.
        what: String,
    },
}
