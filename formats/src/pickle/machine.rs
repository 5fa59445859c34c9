//! The stack machine.

use std::collections::HashMap;

use super::numpy::{self, Dtype};
use super::{Global, Id, Node, STACK_MAX, VALUES_MAX, malformed};
use crate::error::{Error, Result};

/// Newest protocol that is read.
const PROTOCOL_MAX: u8 = 5;
/// Longest module or attribute name.
const NAME_BYTES_MAX: usize = 256;

/// Runs a pickle: all values it made, and the one it ends with.
pub(super) fn run(bytes: &[u8]) -> Result<(Vec<Node>, Id)> {
    let mut machine = Machine {
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
            return Ok((machine.nodes, root));
        }
        machine.step(op)?;
    }
}

struct Machine<'a> {
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
            b']' | b')' => self.push(Node::List(Vec::new())),
            b'}' => self.push(Node::Dict(Vec::new())),
            b'l' | b't' | b'd' | 0x85..=0x87 => self.collect(op),
            b'a' | b'e' => self.append(op),
            b's' | b'u' => self.set_items(op),
            b'h' | b'j' | b'q' | b'r' | 0x94 => self.remember(op),
            b'c' | 0x93 => self.global(op),
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
            _ => Node::Int(self.long(if op == 0x8a { 1 } else { 4 })?),
        };
        self.push(node)
    }

    /// Two's complement of any length; longer ones than 64 bits mean nothing here.
    fn long(&mut self, length_bytes: usize) -> Result<i64> {
        let bytes = self.counted(length_bytes)?;
        if bytes.len() > 8 {
            return Err(self.bad("a number of at most 64 bits", format!("{} bytes", bytes.len())));
        }
        let sign = bytes.last().is_some_and(|last| last & 0x80 != 0);
        let mut all = [if sign { 0xff } else { 0 }; 8];
        all[..bytes.len()].copy_from_slice(bytes);
        Ok(i64::from_le_bytes(all))
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
        let node = if op == b'd' { Node::Dict(self.pair(&items)?) } else { Node::List(items) };
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
        let global = match (module.as_str(), name.as_str()) {
            ("_codecs", "encode") => Global::Encode,
            ("numpy", "dtype") => Global::Dtype,
            ("numpy", "ndarray") => Global::Ndarray,
            ("numpy.core.multiarray" | "numpy._core.multiarray", "scalar") => Global::Scalar,
            ("numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct") => {
                Global::Reconstruct
            }
            ("collections", "OrderedDict") => Global::OrderedDict,
            _ => {
                return Err(Error::Unsupported {
                    what: format!(
                        "the name {} in a pickle (plain values and numpy arrays are read)",
                        format!("{module}.{name}").escape_debug()
                    ),
                });
            }
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
        let (Node::Global(global), Node::List(arguments)) =
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

    /// Gives a dtype its byte order, or an array its contents.
    fn build(&mut self) -> Result<()> {
        let (state, object) = (self.pop()?, self.top()?);
        let Node::List(state) = self.node(state) else {
            return Err(self.bad("a state tuple", "another value"));
        };
        let state: Vec<&Node> = state.iter().map(|id| self.node(*id)).collect();
        let built = match (self.node(object), state.as_slice()) {
            (Node::Dtype(dtype), [_, Node::Text(order), ..]) => {
                dtype.with_order(order).map(Node::Dtype)
            }
            (Node::Array(_), [_, Node::List(shape), Node::Dtype(dtype), fortran, data]) => {
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
