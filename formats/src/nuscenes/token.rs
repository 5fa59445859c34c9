//! Tokens as small numbers: millions of 32-digit texts would fill memory otherwise.

use std::collections::HashMap;
use std::fmt;

/// A token's number. Equal tokens have equal numbers, whatever table they stand in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TokenId(u32);

/// A token as stored: hex digits are packed, anything else is kept as text.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Token {
    Hex32(u128),
    Hex64(Box<[u128; 2]>),
    Text(Box<str>),
}

impl Token {
    fn new(text: &str) -> Self {
        let hex = text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b));
        let part = |range: std::ops::Range<usize>| {
            text.get(range).and_then(|digits| u128::from_str_radix(digits, 16).ok())
        };
        let packed = match (hex, text.len()) {
            (true, 32) => part(0..32).map(Self::Hex32),
            (true, 64) => part(0..32).zip(part(32..64)).map(|(a, b)| Self::Hex64(Box::new([a, b]))),
            _ => None,
        };
        packed.unwrap_or_else(|| Self::Text(text.into()))
    }
}

impl fmt::Display for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hex32(value) => write!(f, "{value:032x}"),
            Self::Hex64(parts) => write!(f, "{:032x}{:032x}", parts[0], parts[1]),
            Self::Text(text) => f.write_str(text),
        }
    }
}

/// All tokens seen, numbered in the order they were first seen.
#[derive(Debug, Default)]
pub struct Tokens {
    ids: HashMap<Token, u32>,
    tokens: Vec<Token>,
}

impl Tokens {
    /// Number of a token; `None` for the empty one, which means "no record".
    pub(super) fn intern(&mut self, text: &str) -> Option<TokenId> {
        if text.is_empty() {
            return None;
        }
        let token = Token::new(text);
        if let Some(id) = self.ids.get(&token) {
            return Some(TokenId(*id));
        }
        let id = u32::try_from(self.tokens.len()).ok()?;
        self.tokens.push(token.clone());
        self.ids.insert(token, id);
        Some(TokenId(id))
    }

    /// The token's text.
    pub fn text(&self, id: TokenId) -> String {
        self.tokens.get(id.0 as usize).map(ToString::to_string).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_come_back_as_they_were() {
        let mut tokens = Tokens::default();
        let texts = [
            "0".repeat(32),
            "00ff00ff00ff00ff00ff00ff00ff00ff".into(),
            "a".repeat(64),
            "A".repeat(32),
            "short".into(),
            "ü".repeat(16),
        ];
        let ids: Vec<_> = texts.iter().map(|t| tokens.intern(t).unwrap()).collect();
        for (text, id) in texts.iter().zip(&ids) {
            assert_eq!(tokens.text(*id), *text);
            assert_eq!(tokens.intern(text), Some(*id));
        }
        assert_eq!(tokens.intern(""), None);
    }
}
