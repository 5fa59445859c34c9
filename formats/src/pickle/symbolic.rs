//! Pickles as recorded calls: what would be called with what, for readers that know the classes of
//! a format (tensors, checkpoints) and give each call its meaning themselves. Nothing is run.

use super::{Id, Node, Pickle, Value};

/// Module and name of what may appear; everything else is refused while reading.
pub type NameList = &'static [(&'static str, &'static str)];

/// A recorded call.
#[derive(Debug, Clone)]
pub(super) struct Symbol {
    /// Position in the list of names.
    pub(super) name: u32,
    /// A tuple.
    pub(super) arguments: Id,
    /// What the object's state was set to afterwards.
    pub(super) state: Option<Id>,
    /// Items that were set on it, for classes derived from dict.
    pub(super) pairs: Vec<(Id, Id)>,
}

/// Values in order.
#[derive(Debug, Clone, Copy)]
pub struct Sequence<'a> {
    pickle: &'a Pickle,
    ids: &'a [Id],
}

/// Keys and values in order.
#[derive(Debug, Clone, Copy)]
pub struct Pairs<'a> {
    pickle: &'a Pickle,
    ids: &'a [(Id, Id)],
}

/// A recorded call.
#[derive(Debug, Clone, Copy)]
pub struct Object<'a> {
    /// Module and name of what was called.
    pub name: (&'static str, &'static str),
    /// The arguments.
    pub arguments: Sequence<'a>,
    /// What the object's state was set to.
    pub state: Option<Value<'a>>,
    /// Items that were set on it.
    pub pairs: Pairs<'a>,
}

/// A value of any kind, one level deep: a pickle may refer to itself.
#[derive(Debug, Clone, Copy)]
pub enum View<'a> {
    /// None.
    None,
    /// A truth value.
    Bool(bool),
    /// A whole number of at most 64 bits.
    Int(i64),
    /// A longer whole number, little-endian two's complement.
    Long(&'a [u8]),
    /// A number.
    Float(f64),
    /// Text.
    Text(&'a str),
    /// Bytes.
    Bytes(&'a [u8]),
    /// A list.
    List(Sequence<'a>),
    /// A tuple.
    Tuple(Sequence<'a>),
    /// A dict.
    Dict(Pairs<'a>),
    /// Module and name of a listed class or function.
    Name(&'static str, &'static str),
    /// A recorded call.
    Object(Object<'a>),
    /// The id of what is kept elsewhere.
    Persistent(Value<'a>),
    /// What plain pickles make of numpy's values.
    Other,
}

impl<'a> Sequence<'a> {
    /// Number of values.
    pub fn len(self) -> usize {
        self.ids.len()
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.ids.is_empty()
    }

    /// The values.
    pub fn iter(self) -> impl ExactSizeIterator<Item = Value<'a>> {
        self.ids.iter().map(move |id| Value { pickle: self.pickle, id: *id })
    }

    /// The value at a position.
    pub fn get(self, at: usize) -> Option<Value<'a>> {
        self.ids.get(at).map(|id| Value { pickle: self.pickle, id: *id })
    }
}

impl<'a> Pairs<'a> {
    /// Number of pairs; a key that was set twice counts twice.
    pub fn len(self) -> usize {
        self.ids.len()
    }

    /// Whether there are none.
    pub fn is_empty(self) -> bool {
        self.ids.is_empty()
    }

    /// Keys and values.
    pub fn iter(self) -> impl ExactSizeIterator<Item = (Value<'a>, Value<'a>)> {
        let at = move |id: &Id| Value { pickle: self.pickle, id: *id };
        self.ids.iter().map(move |(key, value)| (at(key), at(value)))
    }
}

impl Pickle {
    /// The ids of everything that is kept elsewhere, in the order they were named.
    pub fn persistent(&self) -> impl Iterator<Item = Value<'_>> {
        self.nodes.iter().filter_map(move |node| match node {
            Node::Persistent(id) => Some(Value { pickle: self, id: *id }),
            _ => None,
        })
    }
}

impl<'a> Value<'a> {
    /// What it is.
    pub fn view(self) -> View<'a> {
        let pickle = self.pickle;
        let sequence = |ids: &'a Vec<Id>| Sequence { pickle, ids };
        match self.node() {
            Node::None => View::None,
            Node::Bool(value) => View::Bool(*value),
            Node::Int(value) => View::Int(*value),
            Node::Long(bytes) => View::Long(bytes),
            Node::Float(value) => View::Float(*value),
            Node::Text(text) => View::Text(text),
            Node::Bytes(bytes) => View::Bytes(bytes),
            Node::List(ids) => View::List(sequence(ids)),
            Node::Tuple(ids) => View::Tuple(sequence(ids)),
            Node::Dict(ids) => View::Dict(Pairs { pickle, ids }),
            Node::Name(at) => self.listed(*at).map_or(View::Other, |(m, n)| View::Name(m, n)),
            Node::Symbol(symbol) => self.object(symbol).map_or(View::Other, View::Object),
            Node::Persistent(id) => View::Persistent(Value { pickle, id: *id }),
            Node::Array(_) | Node::Dtype(_) | Node::Global(_) => View::Other,
        }
    }

    fn listed(self, at: u32) -> Option<(&'static str, &'static str)> {
        self.pickle.names.get(at as usize).copied()
    }

    fn object(self, symbol: &'a Symbol) -> Option<Object<'a>> {
        let pickle = self.pickle;
        let Node::Tuple(ids) = &pickle.nodes[symbol.arguments.0 as usize] else { return None };
        Some(Object {
            name: self.listed(symbol.name)?,
            arguments: Sequence { pickle, ids },
            state: symbol.state.map(|id| Value { pickle, id }),
            pairs: Pairs { pickle, ids: &symbol.pairs },
        })
    }

    /// A number that tells values of one pickle apart: equal only for the very same value.
    pub fn identity(self) -> u32 {
        self.id.0
    }

    /// A text key's value, from a dict or from the state of a recorded object.
    pub fn field(self, key: &str) -> Option<Value<'a>> {
        match self.view() {
            View::Object(object) => object.state?.get(key),
            _ => self.get(key),
        }
    }
}
