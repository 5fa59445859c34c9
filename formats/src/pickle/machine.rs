//! The stack machine.

use std::collections::HashMap;

use super::numpy::{self, Dtype};
use super::symbolic::{NameList, Symbol};
use super::{Global, Id, Node, STACK_MAX, VALUES_MAX, malformed};
use crate::error::{Error, Result};

/// Newest protocol that is read.
const PROTOCOL_MAX: u8 = 5;
/// Longest module or attribute name.
const NAME_BYTES_MAX: usize = 256;

/// Longest whole number that is kept, in bytes; a Mersenne twister's state is a list of small ones.
const LONG_BYTES_MAX: usize = 256;

/// Runs a pickle: all values it made, the one it ends with, and where it ends. With a list of names
/// calls are recorded instead of being known ones that make plain values.
pub(super) fn run(bytes: &[u8], names: Option<NameList>) -> Result<(Vec<Node>, Id, usize)> {
    let mut machine = Machine {
        names,
        bytes,
        at: 0,
        op_at: 0,
        nodes: Vec::new(),
        stack: Vec::new(),
        marks: Vec::new(),
        memo: HashMap::new(),
    };
    loop {
        machine.op_at = machine.at;
        let op = machine.take(1)?[0];
        if op == b'.' {
            let root = machine.pop()?;
            return Ok((machine.nodes, root, machine.at));
        }
        machine.step(op)?;
    }
}

struct Machine<'a> {
    /// Names whose calls are recorded.
    names: Option<NameList>,
    bytes: &'a [u8],
    at: usize,
    op_at: usize,
    nodes: Vec<Node>,
    stack: Vec<Id>,
    /// Heights of the stack at the open marks.
    marks: Vec<usize>,
    memo: HashMap<u64, Id>,
}

impl<'a> Machine<'a> {
    fn step(&mut self, op: u8) -> Result<()> {
        match op {
            0x80 => self.protocol(),
            0x95 => self.take(8).map(|_| ()),
            b'(' => self.mark(),
            b'0' => self.pop().map(|_| ()),
            b'1' => self.pop_mark().map(|_| ()),
            b'2' => self.top().and_then(|id| self.push_id(id)),
            b'N' => self.push(Node::None),
            0x88 => self.push(Node::Bool(true)),
            0x89 => self.push(Node::Bool(false)),
            b'J' | b'K' | b'M' | 0x8a | 0x8b | b'G' => self.number(op),
            b'X' | 0x8c | 0x8d => self.text(op),
            b'B' | b'C' | 0x8e | 0x96 | b'T' | b'U' => self.raw_bytes(op),
            b']' => self.push(Node::List(Vec::new())),
            b')' => self.push(Node::Tuple(Vec::new())),
            b'}' => self.push(Node::Dict(Vec::new())),
            b'l' | b't' | b'd' | 0x85..=0x87 => self.collect(op),
            b'a' | b'e' => self.append(op),
            b's' | b'u' => self.set_items(op),
            b'h' | b'j' | b'q' | b'r' | 0x94 => self.remember(op),
            b'c' | 0x93 => self.global(op),
            b'R' | 0x81 if self.names.is_some() => self.record_call(),
            b'b' if self.names.is_some() => self.record_state(),
            b'Q' if self.names.is_some() => self.record_persistent(),
            b'R' => self.reduce(),
            b'b' => self.build(),
            other => Err(Error::Unsupported {
                what: format!("pickle operation 0x{other:02x} at byte {}", self.op_at),
            }),
        }
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8]> {
        let have = self.bytes.len() - self.at;
        let found = self.bytes.get(self.at..self.at.saturating_add(len)).filter(|_| len <= have);
        let found = found.ok_or(Error::Truncated {
            what: "pickle",
            offset: self.at as u64,
            need: len as u64,
            have: have as u64,
        })?;
        self.at += len;
        Ok(found)
    }

    /// Little-endian unsigned number of `len` bytes.
    fn unsigned(&mut self, len: usize) -> Result<u64> {
        let bytes = self.take(len)?;
        Ok(bytes.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    }

    /// Bytes after their own length.
    fn counted(&mut self, length_bytes: usize) -> Result<&'a [u8]> {
        let len = self.unsigned(length_bytes)?;
        self.take(usize::try_from(len).unwrap_or(usize::MAX))
    }

    fn bad(&self, expected: &str, found: impl std::fmt::Display) -> Error {
        malformed("pickle", self.op_at, expected, found)
    }

    fn push(&mut self, node: Node) -> Result<()> {
        let id = self.add(node)?;
        self.push_id(id)
    }

    fn add(&mut self, node: Node) -> Result<Id> {
        if self.nodes.len() >= VALUES_MAX {
            return Err(self.too_large("values", VALUES_MAX));
        }
        self.nodes.push(node);
        Ok(Id(self.nodes.len() as u32 - 1))
    }

    fn push_id(&mut self, id: Id) -> Result<()> {
        if self.stack.len() >= STACK_MAX {
            return Err(self.too_large("stack", STACK_MAX));
        }
        self.stack.push(id);
        Ok(())
    }

    fn too_large(&self, what: &'static str, limit: usize) -> Error {
        let limit = limit as u64;
        Error::TooLarge { what, offset: self.op_at as u64, found: limit + 1, limit }
    }

    fn mark(&mut self) -> Result<()> {
        if self.marks.len() >= STACK_MAX {
            return Err(self.too_large("marks", STACK_MAX));
        }
        self.marks.push(self.stack.len());
        Ok(())
    }

    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn pop(&mut self) -> Result<Id> {
        if self.stack.len() <= self.floor() {
            return Err(self.bad("a value on the stack", "none"));
        }
        self.stack.pop().ok_or_else(|| self.bad("a value on the stack", "none"))
    }

    fn top(&self) -> Result<Id> {
        let above = self.stack.len() > self.floor();
        let top = self.stack.last().copied().filter(|_| above);
        top.ok_or_else(|| self.bad("a value on the stack", "none"))
    }

    fn pop_mark(&mut self) -> Result<Vec<Id>> {
        let floor = self.marks.pop().ok_or_else(|| self.bad("a mark on the stack", "none"))?;
        Ok(self.stack.split_off(floor.min(self.stack.len())))
    }

    fn node(&self, id: Id) -> &Node {
        &self.nodes[id.0 as usize]
    }

    fn protocol(&mut self) -> Result<()> {
        let protocol = self.take(1)?[0];
        if protocol > PROTOCOL_MAX {
            return Err(Error::Unsupported { what: format!("pickle protocol {protocol}") });
        }
        Ok(())
    }

    fn number(&mut self, op: u8) -> Result<()> {
        let node = match op {
            b'J' => Node::Int(i64::from(self.unsigned(4)? as u32 as i32)),
            b'K' => Node::Int(self.unsigned(1)? as i64),
            b'M' => Node::Int(self.unsigned(2)? as i64),
            b'G' => {
                // The one big-endian number of the format.
                Node::Float(f64::from_bits(self.unsigned(8)?.swap_bytes()))
            }
            _ => self.long(if op == 0x8a { 1 } else { 4 })?,
        };
        self.push(node)
    }

    /// Two's complement of any length; longer ones than 64 bits mean nothing without a name list.
    fn long(&mut self, length_bytes: usize) -> Result<Node> {
        let bytes = self.counted(length_bytes)?;
        if bytes.len() > 8 {
            if self.names.is_some() && bytes.len() <= LONG_BYTES_MAX {
                return Ok(Node::Long(bytes.into()));
            }
            return Err(self.bad("a number of at most 64 bits", format!("{} bytes", bytes.len())));
        }
        let sign = bytes.last().is_some_and(|last| last & 0x80 != 0);
        let mut all = [if sign { 0xff } else { 0 }; 8];
        all[..bytes.len()].copy_from_slice(bytes);
        Ok(Node::Int(i64::from_le_bytes(all)))
    }

    fn text(&mut self, op: u8) -> Result<()> {
        let bytes = self.counted(match op {
            0x8c => 1,
            b'X' => 4,
            _ => 8,
        })?;
        let text = std::str::from_utf8(bytes).map_err(|e| self.bad("UTF-8 text", e))?;
        self.push(Node::Text(text.into()))
    }

    fn raw_bytes(&mut self, op: u8) -> Result<()> {
        let bytes = self.counted(match op {
            b'C' | b'U' => 1,
            b'B' | b'T' => 4,
            _ => 8,
        })?;
        self.push(Node::Bytes(bytes.into()))
    }

    fn collect(&mut self, op: u8) -> Result<()> {
        let items = match op {
            b'l' | b't' | b'd' => self.pop_mark()?,
            short => {
                let mut items = Vec::new();
                for _ in 0..=short - 0x85 {
                    items.insert(0, self.pop()?);
                }
                items
            }
        };
        let node = match op {
            b'd' => Node::Dict(self.pair(&items)?),
            b'l' => Node::List(items),
            _ => Node::Tuple(items),
        };
        self.push(node)
    }

    fn pair(&self, items: &[Id]) -> Result<Vec<(Id, Id)>> {
        if !items.len().is_multiple_of(2) {
            return Err(self.bad("keys with values", format!("{} items", items.len())));
        }
        Ok(items.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect())
    }

    fn append(&mut self, op: u8) -> Result<()> {
        let items = if op == b'e' { self.pop_mark()? } else { vec![self.pop()?] };
        let list = self.top()?;
        match &mut self.nodes[list.0 as usize] {
            Node::List(all) => all.extend(items),
            _ => return Err(self.bad("a list to append to", "another value")),
        }
        Ok(())
    }

    fn set_items(&mut self, op: u8) -> Result<()> {
        let items = if op == b'u' {
            self.pop_mark()?
        } else {
            let value = self.pop()?;
            vec![self.pop()?, value]
        };
        let pairs = self.pair(&items)?;
        let dict = self.top()?;
        match &mut self.nodes[dict.0 as usize] {
            Node::Dict(all) => all.extend(pairs),
            Node::Symbol(symbol) => symbol.pairs.extend(pairs),
            _ => return Err(self.bad("a dict to set items of", "another value")),
        }
        Ok(())
    }

    fn remember(&mut self, op: u8) -> Result<()> {
        let key = match op {
            b'h' | b'q' => self.unsigned(1)?,
            b'j' | b'r' => self.unsigned(4)?,
            _ => self.memo.len() as u64,
        };
        if matches!(op, b'h' | b'j') {
            let known = self.memo.get(&key).copied();
            let id = known.ok_or_else(|| self.bad("a value that was stored", key))?;
            return self.push_id(id);
        }
        let id = self.top()?;
        self.memo.insert(key, id);
        Ok(())
    }

    fn global(&mut self, op: u8) -> Result<()> {
        let (module, name) = if op == b'c' {
            (self.line()?, self.line()?)
        } else {
            let (name, module) = (self.pop()?, self.pop()?);
            match (self.node(module), self.node(name)) {
                (Node::Text(module), Node::Text(name)) => (module.to_string(), name.to_string()),
                _ => return Err(self.bad("the text of a name", "another value")),
            }
        };
        if let Some(names) = self.names {
            let found = names.iter().position(|&known| known == (module.as_str(), name.as_str()));
            let at = found.ok_or_else(|| unknown_name(&module, &name, "names of tensors"))?;
            return self.push(Node::Name(at as u32));
        }
        let global = match (module.as_str(), name.as_str()) {
            ("_codecs", "encode") => Global::Encode,
            ("numpy", "dtype") => Global::Dtype,
            ("numpy", "ndarray") => Global::Ndarray,
            ("numpy.core.multiarray" | "numpy._core.multiarray", "scalar") => Global::Scalar,
            ("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct") => {
                Global::Reconstruct
            }
            ("collections", "OrderedDict") => Global::OrderedDict,
            _ => return Err(unknown_name(&module, &name, "numpy arrays")),
        };
        self.push(Node::Global(global))
    }

    fn line(&mut self) -> Result<String> {
        let rest = &self.bytes[self.at..];
        let end = rest.iter().take(NAME_BYTES_MAX).position(|byte| *byte == b'\n');
        let end = end.ok_or_else(|| self.bad("a short name", "none"))?;
        let line = self.take(end + 1)?;
        let text = std::str::from_utf8(&line[..end]).map_err(|e| self.bad("UTF-8 text", e))?;
        Ok(text.to_string())
    }

    fn reduce(&mut self) -> Result<()> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let (Node::Global(global), Node::List(arguments) | Node::Tuple(arguments)) =
            (self.node(function), self.node(arguments))
        else {
            return Err(self.bad("a call of a known name", "another value"));
        };
        let arguments: Vec<&Node> = arguments.iter().map(|id| self.node(*id)).collect();
        let node = match (global, arguments.as_slice()) {
            (Global::Encode, [Node::Text(text), ..]) => numpy::latin1(text).map(Node::Bytes),
            (Global::Dtype, [Node::Text(code), ..]) => Dtype::parse(code).map(Node::Dtype),
            (Global::Scalar, [Node::Dtype(dtype), Node::Bytes(bytes)]) => dtype.scalar(bytes),
            (Global::Reconstruct, [Node::Global(Global::Ndarray), ..]) => {
                Some(Node::Array(Box::default()))
            }
            (Global::OrderedDict, []) => Some(Node::Dict(Vec::new())),
            _ => None,
        };
        match node {
            Some(node) => self.push(node),
            None => Err(self.bad("arguments of a known form", format!("those of {global:?}"))),
        }
    }

    /// Notes a call of a listed name, or the making of an object of a listed class.
    fn record_call(&mut self) -> Result<()> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let (Node::Name(name), Node::Tuple(_)) = (self.node(function), self.node(arguments)) else {
            return Err(self.bad("a call of a listed name", "another value"));
        };
        let symbol = Symbol { name: *name, arguments, state: None, pairs: Vec::new() };
        self.push(Node::Symbol(Box::new(symbol)))
    }

    fn record_state(&mut self) -> Result<()> {
        let (state, object) = (self.pop()?, self.top()?);
        match &mut self.nodes[object.0 as usize] {
            Node::Symbol(symbol) => symbol.state = Some(state),
            _ => return Err(self.bad("an object of a listed class", "another value")),
        }
        Ok(())
    }

    fn record_persistent(&mut self) -> Result<()> {
        let id = self.pop()?;
        self.push(Node::Persistent(id))
    }

    /// Gives a dtype its byte order, or an array its contents.
    fn build(&mut self) -> Result<()> {
        let (state, object) = (self.pop()?, self.top()?);
        let (Node::List(state) | Node::Tuple(state)) = self.node(state) else {
            return Err(self.bad("a state tuple", "another value"));
        };
        let state: Vec<&Node> = state.iter().map(|id| self.node(*id)).collect();
        let built = match (self.node(object), state.as_slice()) {
            (Node::Dtype(dtype), [_, Node::Text(order), ..]) => {
                dtype.with_order(order).map(Node::Dtype)
            }
            (
                Node::Array(_),
                [_, Node::List(shape) | Node::Tuple(shape), Node::Dtype(dtype), fortran, data],
            ) => {
                let shape: Option<Vec<_>> =
                    shape.iter().map(|id| numpy::dimension(self.node(*id))).collect();
                let fortran = matches!(fortran, Node::Bool(true));
                match (shape, data) {
                    (Some(shape), Node::Bytes(data)) => {
                        dtype.array(&shape, fortran, data).map(|a| Node::Array(Box::new(a)))
                    }
                    _ => None,
                }
            }
            _ => None,
        };
        let built = built.ok_or_else(|| self.bad("a numeric dtype or array", "another state"))?;
        self.nodes[object.0 as usize] = built;
        Ok(())
    }
}

fn unknown_name(module: &str, name: &str, known: &str) -> Error {
    let name = format!("{module}.{name}");
    let what =
        format!("the name {} in a pickle (plain values and {known} are read)", name.escape_debug());
    Error::Unsupported { what }
}
