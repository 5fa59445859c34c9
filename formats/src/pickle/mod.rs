//! A pickle reader that cannot run anything: protocols 2–5, plain containers, numbers, text, and
//! numpy scalars and arrays through a fixed list of names. Every other name is refused by name.
//!
//! A pickle is a program for a stack machine. Values live in one arena and refer to each other by
//! number, so that sharing costs nothing and no value, however nested, is walked by recursion.

mod machine;
mod numpy;
mod symbolic;

use std::fmt;

use crate::error::{Error, Result};

pub use symbolic::{NameList, Object, Pairs, Sequence, View};

/// Values of one pickle; an info file of all of nuScenes has some forty million.
pub const VALUES_MAX: usize = 1 << 27;
/// Marks and unfinished values on the stack.
pub const STACK_MAX: usize = 1 << 24;
/// Numbers of one array.
pub const ARRAY_ITEMS_MAX: usize = 1 << 24;

/// Number of a value in its pickle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Id(u32);

/// Names that may be called, because calling them only makes plain values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Global {
    Encode,
    Dtype,
    Scalar,
    Ndarray,
    Reconstruct,
    OrderedDict,
}

#[derive(Debug, Clone)]
enum Node {
    None,
    Bool(bool),
    Int(i64),
    Float(f64),
    Text(Box<str>),
    Bytes(Box<[u8]>),
    List(Vec<Id>),
    Tuple(Vec<Id>),
    Dict(Vec<(Id, Id)>),
    Array(Box<numpy::Array>),
    Dtype(numpy::Dtype),
    Global(Global),
    /// A whole number of more than 64 bits: little-endian two's complement.
    Long(Box<[u8]>),
    /// Position in the list of names.
    Name(u32),
    /// A recorded call.
    Symbol(Box<symbolic::Symbol>),
    /// What the file's writer keeps elsewhere (tensor storages), by its id.
    Persistent(Id),
}

/// A parsed pickle.
#[derive(Debug)]
pub struct Pickle {
    nodes: Vec<Node>,
    root: Id,
    names: NameList,
}

impl Pickle {
    /// Runs the pickle in `bytes`.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        let (nodes, root, _) = machine::run(bytes, None)?;
        Ok(Self { nodes, root, names: &[] })
    }

    /// Runs the pickle at the start of `bytes`, recording calls of listed names instead of making
    /// values of them; other names are refused. Returns where the pickle ends, too.
    pub fn parse_symbolic(bytes: &[u8], names: NameList) -> Result<(Self, usize)> {
        let (nodes, root, end) = machine::run(bytes, Some(names))?;
        Ok((Self { nodes, root, names }, end))
    }

    /// The value it makes.
    pub fn root(&self) -> Value<'_> {
        Value { pickle: self, id: self.root }
    }
}

/// A value of a pickle.
#[derive(Clone, Copy)]
pub struct Value<'a> {
    pickle: &'a Pickle,
    id: Id,
}

impl<'a> Value<'a> {
    fn node(self) -> &'a Node {
        &self.pickle.nodes[self.id.0 as usize]
    }

    fn at(self, id: Id) -> Self {
        Self { pickle: self.pickle, id }
    }

    /// Value of a text key of a dict.
    pub fn get(self, key: &str) -> Option<Value<'a>> {
        let Node::Dict(pairs) = self.node() else { return None };
        // The last of equal keys wins, as in Python.
        let found = pairs.iter().rev().find(|(k, _)| self.at(*k).as_str() == Some(key));
        found.map(|(_, value)| self.at(*value))
    }

    /// Items of a list or tuple.
    pub fn items(self) -> Option<impl ExactSizeIterator<Item = Value<'a>> + 'a> {
        let (Node::List(items) | Node::Tuple(items)) = self.node() else { return None };
        Some(items.iter().map(move |id| self.at(*id)))
    }

    /// Keys and values of a dict.
    pub fn pairs(self) -> Option<impl ExactSizeIterator<Item = (Value<'a>, Value<'a>)> + 'a> {
        let Node::Dict(pairs) = self.node() else { return None };
        Some(pairs.iter().map(move |(key, value)| (self.at(*key), self.at(*value))))
    }

    /// Text.
    pub fn as_str(self) -> Option<&'a str> {
        if let Node::Text(text) = self.node() { Some(text) } else { None }
    }

    /// A whole number.
    pub fn as_i64(self) -> Option<i64> {
        match self.node() {
            Node::Int(value) => Some(*value),
            Node::Bool(value) => Some(i64::from(*value)),
            _ => None,
        }
    }

    /// Any number.
    pub fn as_f64(self) -> Option<f64> {
        match self.node() {
            Node::Float(value) => Some(*value),
            Node::Int(value) => Some(*value as f64),
            _ => None,
        }
    }

    /// Whether it is None.
    pub fn is_none(self) -> bool {
        matches!(self.node(), Node::None)
    }

    /// Exactly `N` numbers, from a list, a tuple or an array, or a list of such, row by row.
    pub fn numbers<const N: usize>(self) -> Option<[f64; N]> {
        let mut out = Vec::with_capacity(N);
        self.collect(&mut out, N)?;
        if let Node::List(rows) | Node::Tuple(rows) = self.node()
            && out.is_empty()
        {
            for row in rows {
                self.at(*row).collect(&mut out, N)?;
            }
        }
        out.try_into().ok()
    }

    /// Appends the numbers of one row; nothing for a list of lists.
    fn collect(self, out: &mut Vec<f64>, max: usize) -> Option<()> {
        match self.node() {
            Node::Array(array) => out.extend(array.values.iter().take(max + 1)),
            Node::List(items) | Node::Tuple(items) if items.len() <= max => {
                let nested = items.iter().all(|id| self.at(*id).as_f64().is_none());
                if !nested {
                    let row: Option<Vec<_>> =
                        items.iter().map(|id| self.at(*id).as_f64()).collect();
                    out.extend(row?);
                }
            }
            _ => return None,
        }
        (out.len() <= max).then_some(())
    }

    /// What kind of value it is, for errors.
    pub fn kind(self) -> &'static str {
        match self.node() {
            Node::None => "None",
            Node::Bool(_) => "bool",
            Node::Int(_) | Node::Long(_) => "int",
            Node::Float(_) => "float",
            Node::Text(_) => "str",
            Node::Bytes(_) => "bytes",
            Node::List(_) => "list",
            Node::Tuple(_) => "tuple",
            Node::Dict(_) => "dict",
            Node::Array(_) => "array",
            Node::Dtype(_) => "dtype",
            Node::Global(_) | Node::Name(_) => "name",
            Node::Symbol(_) => "object",
            Node::Persistent(_) => "reference",
        }
    }
}

impl fmt::Debug for Value<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // One level only: a pickle may refer to itself.
        f.write_str(self.kind())
    }
}

fn malformed(what: &'static str, offset: usize, expected: &str, found: impl fmt::Display) -> Error {
    Error::Malformed {
        what,
        offset: offset as u64,
        expected: expected.to_string(),
        found: found.to_string(),
    }
}

#[cfg(test)]
mod tests;
