//! Tensors as a tree of their keys, with the bytes below each.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use super::{TensorRow, human_bytes};

/// A key and what is below it.
#[derive(Default)]
struct Node<'a> {
    bytes: u64,
    tensors: usize,
    tensor: Option<&'a TensorRow>,
    below: BTreeMap<Key, Node<'a>>,
}

/// Sorts numbers as numbers: layer 10 after layer 9.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Key {
    Number(u64),
    Text(String),
}

impl Key {
    fn of(text: &str) -> Self {
        text.parse().map_or_else(|_| Self::Text(text.into()), Self::Number)
    }

    fn text(&self) -> String {
        match self {
            Self::Number(n) => n.to_string(),
            Self::Text(text) => text.clone(),
        }
    }
}

/// The tree as indented lines, `depth` levels deep.
pub fn tree_text(tensors: &[TensorRow], depth: usize) -> String {
    let mut root = Node::default();
    for tensor in tensors {
        let mut node = &mut root;
        node.add(tensor);
        for key in super::keys_text(&tensor.path).split('.') {
            node = node.below.entry(Key::of(key)).or_default();
            node.add(tensor);
        }
        node.tensor = Some(tensor);
    }
    let mut text = String::new();
    root.write(&mut text, 1, depth);
    text
}

impl Node<'_> {
    fn add(&mut self, tensor: &TensorRow) {
        self.bytes += tensor.bytes;
        self.tensors += 1;
    }

    /// Recursion is as deep as a path has keys, which the reader of the state limits.
    fn write(&self, text: &mut String, level: usize, depth: usize) {
        for (key, node) in &self.below {
            let (mut name, mut node) = (key.text(), node);
            // A key with nothing beside it needs no line of its own.
            while let (None, 1, Some((key, only))) =
                (node.tensor, node.below.len(), node.below.iter().next())
            {
                name = format!("{name}.{}", key.text());
                node = only;
            }
            let indent = "  ".repeat(level);
            let size = human_bytes(node.bytes);
            let _ = match node.tensor {
                Some(t) if t.chunks == 1 => {
                    writeln!(text, "{size:>10}{indent}{name}  {} {:?}", t.dtype, t.shape)
                }
                Some(t) => writeln!(
                    text,
                    "{size:>10}{indent}{name}  {} {:?} in {} chunks",
                    t.dtype, t.shape, t.chunks
                ),
                None => writeln!(text, "{size:>10}{indent}{name}  ({} tensors)", node.tensors),
            };
            if level < depth {
                node.write(text, level + 1, depth);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(path: &str, bytes: u64) -> TensorRow {
        TensorRow {
            path: path.into(),
            dtype: "F32".into(),
            shape: vec![2],
            bytes,
            stored_bytes: bytes,
            chunks: 1,
        }
    }

    #[test]
    fn sizes_add_up_and_lone_keys_share_a_line() {
        let rows = [
            row(r#"["model","layers.10.w"]"#, 1024),
            row(r#"["model","layers.9.w"]"#, 2048),
            row(r#"["opt","state",0,"exp"]"#, 8),
        ];
        let text = tree_text(&rows, 9);
        let lines: Vec<&str> = text.lines().map(str::trim).collect();
        assert_eq!(
            lines,
            [
                "3.0 KiB  model.layers  (2 tensors)",
                "2.0 KiB    9.w  F32 [2]",
                "1.0 KiB    10.w  F32 [2]",
                "8 B  opt.state.0.exp  F32 [2]",
            ]
        );
        assert_eq!(tree_text(&rows, 1).lines().count(), 2);
    }
}
