//! Walks the coded data of a sequential JPEG and counts its blocks, without decoding pixels.
//!
//! zune-jpeg calls a picture complete whose middle is missing, as long as an end marker stands
//! somewhere. libjpeg-turbo notices by itself; for builds without it the symbols are counted here
//! (Huffman decoding as in ITU-T T.81, annex F.2.2). Progressive pictures are not walked.

use crate::error::{Error, Result};

/// Codes up to this length are found by one look-up.
const FAST_BITS: usize = 9;
/// Longest Huffman code.
const CODE_BITS_MAX: usize = 16;
/// Segments of one picture; each scan is one, and a sequential picture has at most four.
const SEGMENTS_MAX: usize = 4096;
const COMPONENTS_MAX: usize = 4;

/// Checks that every scan holds all its blocks and that every component has a scan.
pub fn check(jpeg: &[u8], file: &str) -> Result<()> {
    let mut walk = Walk { jpeg, file, at: 2, ..Walk::default() };
    for _ in 0..SEGMENTS_MAX {
        match walk.marker()? {
            0xD9 => return walk.finish(),
            0x01 | 0xD0..=0xD8 => {}
            // Motion JPEG leaves out the standard's own tables; its decoder knows them.
            0xDA if walk.tables.iter().flatten().all(Option::is_none) => return Ok(()),
            marker => {
                let body = walk.body()?;
                walk.segment(marker, body)?;
            }
        }
    }
    Err(walk.corrupt(format!("an end marker within {SEGMENTS_MAX} segments"), "none"))
}

/// One Huffman table.
#[derive(Clone)]
struct Table {
    /// By the next `FAST_BITS` bits: code length and symbol; length 0 where the code is longer.
    fast: [(u8, u8); 1 << FAST_BITS],
    /// By code length: one more than its last code, left-aligned to 16 bits.
    end: [u32; CODE_BITS_MAX + 1],
    /// By code length: index of its first symbol less its first code.
    first: [i32; CODE_BITS_MAX + 1],
    symbols: Vec<u8>,
}

impl Table {
    fn new(counts: &[u8], symbols: &[u8]) -> Self {
        let mut table = Self {
            fast: [(0, 0); 1 << FAST_BITS],
            end: [0; CODE_BITS_MAX + 1],
            first: [0; CODE_BITS_MAX + 1],
            symbols: symbols.to_vec(),
        };
        let (mut code, mut index) = (0_u32, 0_usize);
        for bits in 1..=CODE_BITS_MAX {
            table.first[bits] = index as i32 - code as i32;
            for _ in 0..counts[bits - 1] {
                table.add_fast(bits, code, index);
                (code, index) = (code + 1, index + 1);
            }
            table.end[bits] = code << (CODE_BITS_MAX - bits);
            code <<= 1;
        }
        table
    }

    fn add_fast(&mut self, bits: usize, code: u32, index: usize) {
        if bits > FAST_BITS {
            return;
        }
        let from = (code as usize) << (FAST_BITS - bits);
        let symbol = self.symbols.get(index).copied().unwrap_or(0);
        for entry in self.fast.iter_mut().skip(from).take(1 << (FAST_BITS - bits)) {
            *entry = (bits as u8, symbol);
        }
    }

    /// Length and symbol of the code at the top of `peek`'s 16 bits.
    fn find(&self, peek: u32) -> Option<(usize, u8)> {
        let (bits, symbol) = self.fast[(peek >> (CODE_BITS_MAX - FAST_BITS)) as usize];
        if bits > 0 {
            return Some((usize::from(bits), symbol));
        }
        let bits = (FAST_BITS + 1..=CODE_BITS_MAX).find(|bits| peek < self.end[*bits])?;
        let index = (peek >> (CODE_BITS_MAX - bits)) as i32 + self.first[bits];
        let symbol = self.symbols.get(usize::try_from(index).ok()?)?;
        Some((bits, *symbol))
    }
}

/// Bits of the coded data up to the next marker.
struct Bits<'a> {
    jpeg: &'a [u8],
    at: usize,
    held: u64,
    count: usize,
}

impl Bits<'_> {
    fn fill(&mut self) {
        while self.count <= 48 {
            let byte = match self.jpeg.get(self.at..) {
                Some([0xFF, 0, ..]) => {
                    self.at += 1;
                    0xFF
                }
                Some([0xFF, ..] | []) | None => return,
                Some([byte, ..]) => *byte,
            };
            self.at += 1;
            self.held = self.held << 8 | u64::from(byte);
            self.count += 8;
        }
    }

    /// The next 16 bits, zeros after the end.
    fn peek(&mut self) -> u32 {
        if self.count < CODE_BITS_MAX {
            self.fill();
        }
        let bits = match self.count.checked_sub(CODE_BITS_MAX) {
            Some(spare) => self.held >> spare,
            None => self.held << (CODE_BITS_MAX - self.count),
        };
        (bits & 0xFFFF) as u32
    }

    fn skip(&mut self, bits: usize) -> Option<()> {
        if self.count < bits {
            self.fill();
        }
        self.count = self.count.checked_sub(bits)?;
        Some(())
    }

    fn symbol(&mut self, table: &Table) -> Option<u8> {
        let peek = self.peek();
        let (bits, symbol) = table.find(peek)?;
        self.skip(bits)?;
        Some(symbol)
    }

    /// Passes one block of 64 coefficients.
    fn block(&mut self, dc: &Table, ac: &Table) -> Option<()> {
        let bits = self.symbol(dc)?;
        self.skip(usize::from(bits & 15))?;
        let mut coefficient = 1;
        while coefficient < 64 {
            let symbol = self.symbol(ac)?;
            let (run, bits) = (usize::from(symbol >> 4), usize::from(symbol & 15));
            if bits == 0 && run < 15 {
                break;
            }
            coefficient += run + 1;
            self.skip(bits)?;
        }
        Some(())
    }

    /// Goes past a restart marker.
    fn restart(&mut self) -> Option<()> {
        (self.held, self.count) = (0, 0);
        let rest = self.jpeg.get(self.at..)?;
        let fill = rest.iter().take_while(|b| **b == 0xFF).count();
        if fill == 0 || !matches!(rest.get(fill), Some(0xD0..=0xD7)) {
            return None;
        }
        self.at += fill + 1;
        Some(())
    }
}

#[derive(Clone, Copy, Default)]
struct Component {
    id: u8,
    across: usize,
    down: usize,
    scanned: bool,
}

/// DC tables, then AC tables, by their number.
type Tables = [[Option<Box<Table>>; 4]; 2];

#[derive(Default)]
struct Walk<'a> {
    jpeg: &'a [u8],
    file: &'a str,
    at: usize,
    tables: Tables,
    components: Vec<Component>,
    width: usize,
    height: usize,
    restart: usize,
}

impl<'a> Walk<'a> {
    fn corrupt(&self, expected: impl std::fmt::Display, found: impl std::fmt::Display) -> Error {
        let advice = "the JPEG is damaged or cut off; fetch the file again or drop it";
        Error::corrupt(self.file, self.at as u64, expected, found, advice)
    }

    /// Next marker, past whatever stands before it.
    fn marker(&mut self) -> Result<u8> {
        let rest = self.jpeg.get(self.at..).unwrap_or_default();
        let found = rest.windows(2).position(|w| w[0] == 0xFF && !matches!(w[1], 0 | 0xFF));
        let Some(found) = found else {
            return Err(self.corrupt("a marker", "the end of the data"));
        };
        self.at += found + 2;
        Ok(rest[found + 1])
    }

    fn body(&mut self) -> Result<&'a [u8]> {
        let rest = self.jpeg.get(self.at..).unwrap_or_default();
        let length = match rest {
            [high, low, ..] => usize::from(u16::from_be_bytes([*high, *low])),
            _ => 0,
        };
        let body = rest.get(2..length);
        let body = body.ok_or_else(|| self.corrupt("a whole segment", "the end of the data"))?;
        self.at += length;
        Ok(body)
    }

    fn segment(&mut self, marker: u8, body: &'a [u8]) -> Result<()> {
        match marker {
            0xC0 | 0xC1 => self.frame(body),
            0xC4 => self.huffman(body),
            0xDD => {
                let interval = body.first_chunk::<2>().map_or(0, |b| u16::from_be_bytes(*b));
                self.restart = usize::from(interval);
                Ok(())
            }
            0xDA => self.scan(body),
            _ => Ok(()),
        }
    }

    fn frame(&mut self, body: &[u8]) -> Result<()> {
        let [_, h1, h0, w1, w0, count, rest @ ..] = body else {
            return Err(self.corrupt("a frame header", format!("{} bytes", body.len())));
        };
        self.height = usize::from(u16::from_be_bytes([*h1, *h0]));
        self.width = usize::from(u16::from_be_bytes([*w1, *w0]));
        let parts = rest.chunks_exact(3).take(usize::from(*count).min(COMPONENTS_MAX));
        let component = |c: &[u8]| Component {
            id: c[0],
            across: usize::from(c[1] >> 4).clamp(1, 4),
            down: usize::from(c[1] & 15).clamp(1, 4),
            scanned: false,
        };
        self.components = parts.map(component).collect();
        Ok(())
    }

    fn huffman(&mut self, mut body: &[u8]) -> Result<()> {
        while let Some((&kind, rest)) = body.split_first() {
            let counts = rest.get(..CODE_BITS_MAX).unwrap_or_default();
            let total: usize = counts.iter().map(|c| usize::from(*c)).sum();
            let Some(symbols) = rest.get(CODE_BITS_MAX..CODE_BITS_MAX + total) else {
                return Err(self.corrupt("a whole Huffman table", "the end of its segment"));
            };
            let (class, id) = (usize::from(kind >> 4) & 1, usize::from(kind & 3));
            self.tables[class][id] = Some(Box::new(Table::new(counts, symbols)));
            body = &rest[CODE_BITS_MAX + total..];
        }
        Ok(())
    }

    fn scan(&mut self, body: &[u8]) -> Result<()> {
        let wanted = usize::from(body.first().copied().unwrap_or(0)).min(COMPONENTS_MAX);
        let picks: Vec<_> =
            body.get(1..).unwrap_or_default().chunks_exact(2).take(wanted).collect();
        let most = |f: fn(&Component) -> usize| self.components.iter().map(f).max().unwrap_or(1);
        let (across, down) = (most(|c| c.across), most(|c| c.down));
        let mut parts = Vec::new();
        for pick in &picks {
            let index = self.components.iter().position(|c| c.id == pick[0]);
            let table = |class: usize, id: u8| self.tables[class][usize::from(id & 3)].as_deref();
            let found = index.zip(table(0, pick[1] >> 4)).zip(table(1, pick[1]));
            let Some(((index, dc), ac)) = found else {
                return Err(self.corrupt("a known component and its tables in a scan", "none"));
            };
            parts.push((self.components[index], dc, ac));
        }
        let units = match &parts[..] {
            [(c, ..)] => {
                let w = (self.width * c.across).div_ceil(across).div_ceil(8);
                w * (self.height * c.down).div_ceil(down).div_ceil(8)
            }
            _ => self.width.div_ceil(8 * across) * self.height.div_ceil(8 * down),
        };
        let single = parts.len() == 1;
        let mut bits = Bits { jpeg: self.jpeg, at: self.at, held: 0, count: 0 };
        let done = (0..units).position(|unit| {
            let due = self.restart > 0 && unit > 0 && unit % self.restart == 0;
            let read = (!due || bits.restart().is_some())
                && parts.iter().all(|(c, dc, ac)| {
                    let blocks = if single { 1 } else { c.across * c.down };
                    (0..blocks).all(|_| bits.block(dc, ac).is_some())
                });
            !read
        });
        self.at = bits.at;
        if let Some(done) = done {
            let found = format!("{done} before the next marker");
            return Err(self.corrupt(format!("{units} coded units in a scan"), found));
        }
        for pick in picks {
            let named = self.components.iter_mut().filter(|c| c.id == pick[0]);
            named.for_each(|c| c.scanned = true);
        }
        Ok(())
    }

    fn finish(&self) -> Result<()> {
        match self.components.iter().find(|c| !c.scanned) {
            None => Ok(()),
            Some(c) => Err(self.corrupt(format!("a scan of component {}", c.id), "the end marker")),
        }
    }
}

#[cfg(test)]
mod tests {
    use jpeg_encoder::{ColorType, Encoder, SamplingFactor};
    use proptest::prelude::*;

    use super::*;

    fn encode(width: u16, height: u16, sampling: SamplingFactor, restart: Option<u16>) -> Vec<u8> {
        let pixels: Vec<u8> = (0..usize::from(width) * usize::from(height) * 3)
            .map(|i| ((i * 7919) ^ (i >> 5)) as u8)
            .collect();
        let mut out = Vec::new();
        let mut encoder = Encoder::new(&mut out, 90);
        encoder.set_sampling_factor(sampling);
        if let Some(interval) = restart {
            encoder.set_restart_interval(interval);
        }
        encoder.encode(&pixels, width, height, ColorType::Rgb).unwrap();
        out
    }

    #[test]
    fn whole_pictures_pass_and_a_missing_middle_does_not() {
        let samplings = [SamplingFactor::R_4_4_4, SamplingFactor::R_4_2_0, SamplingFactor::R_4_2_2];
        for sampling in samplings {
            for (width, height) in [(1, 1), (17, 9), (64, 48), (131, 77)] {
                for restart in [None, Some(3)] {
                    let whole = encode(width, height, sampling, restart);
                    check(&whole, "a.jpg").unwrap();
                    if width < 60 {
                        continue;
                    }
                    let mut cut = whole[..whole.len() / 2].to_vec();
                    cut.extend([0xFF, 0xD9]);
                    let error = check(&cut, "a.jpg").unwrap_err().to_string();
                    assert!(error.contains("a.jpg") && error.contains("coded units"), "{error}");
                }
            }
        }
    }

    proptest! {
        #[test]
        fn no_bytes_panic(
            head in 2_usize..700,
            tail in proptest::collection::vec(any::<u8>(), 0..300),
        ) {
            let whole = encode(24, 24, SamplingFactor::R_4_2_0, None);
            let mut bytes = whole[..head.min(whole.len())].to_vec();
            bytes.extend(tail);
            let _ = check(&bytes, "a.jpg");
        }
    }
}
