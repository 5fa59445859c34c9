//! Numbers to planes and back. Plane `p` holds byte `p` of every number, the lowest first, after
//! the number was rotated left by one bit if the form says so.
//!
//! The loops are written for the compiler to turn into vectors; on x86-64 they are compiled a
//! second time for AVX2, which has the byte shuffles that this is about.

use super::{Form, PLANES_MAX};

/// Takes `raw`, a whole number of numbers, apart. `planes` is as long and holds them one by one.
pub fn split(form: Form, raw: &[u8], planes: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2; the body is the safe one.
        unsafe { avx2::split(form, raw, planes) };
        return;
    }
    split_all(form, raw, planes);
}

/// Puts numbers together; the first `form.width` planes are used, each `raw.len() / width` long.
pub fn merge(form: Form, planes: &[&[u8]; PLANES_MAX], raw: &mut [u8]) {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx2") {
        // SAFETY: the processor has AVX2; the body is the safe one.
        unsafe { avx2::merge(form, planes, raw) };
        return;
    }
    merge_all(form, planes, raw);
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use super::{Form, PLANES_MAX};

    /// # Safety
    /// The processor has AVX2.
    #[target_feature(enable = "avx2")]
    pub unsafe fn split(form: Form, raw: &[u8], planes: &mut [u8]) {
        super::split_all(form, raw, planes);
    }

    /// # Safety
    /// The processor has AVX2.
    #[target_feature(enable = "avx2")]
    pub unsafe fn merge(form: Form, planes: &[&[u8]; PLANES_MAX], raw: &mut [u8]) {
        super::merge_all(form, planes, raw);
    }
}

#[inline(always)]
fn split_all(form: Form, raw: &[u8], planes: &mut [u8]) {
    match (form.width, form.rotated) {
        (2, false) => split2(raw, planes, |n| n),
        (2, true) => split2(raw, planes, |n| n.rotate_left(1)),
        (4, false) => split4(raw, planes, |n| n),
        (4, true) => split4(raw, planes, |n| n.rotate_left(1)),
        (8, false) => split8(raw, planes, |n| n),
        (8, true) => split8(raw, planes, |n| n.rotate_left(1)),
        _ => planes.copy_from_slice(raw),
    }
}

#[inline(always)]
fn merge_all(form: Form, planes: &[&[u8]; PLANES_MAX], raw: &mut [u8]) {
    match (form.width, form.rotated) {
        (2, false) => merge2(planes, raw, |n| n),
        (2, true) => merge2(planes, raw, |n| n.rotate_right(1)),
        (4, false) => merge4(planes, raw, |n| n),
        (4, true) => merge4(planes, raw, |n| n.rotate_right(1)),
        (8, false) => merge8(planes, raw, |n| n),
        (8, true) => merge8(planes, raw, |n| n.rotate_right(1)),
        _ => raw.copy_from_slice(planes[0]),
    }
}

#[inline(always)]
fn split2(raw: &[u8], planes: &mut [u8], turn: impl Fn(u16) -> u16) {
    let numbers = raw.as_chunks::<2>().0;
    let (low, high) = planes.split_at_mut(numbers.len());
    for ((bytes, low), high) in numbers.iter().zip(low).zip(high) {
        let n = turn(u16::from_le_bytes(*bytes));
        (*low, *high) = (n as u8, (n >> 8) as u8);
    }
}

#[inline(always)]
fn merge2(planes: &[&[u8]; PLANES_MAX], raw: &mut [u8], turn: impl Fn(u16) -> u16) {
    let numbers = raw.as_chunks_mut::<2>().0;
    for ((bytes, &low), &high) in numbers.iter_mut().zip(planes[0]).zip(planes[1]) {
        *bytes = turn(u16::from(low) | u16::from(high) << 8).to_le_bytes();
    }
}

#[inline(always)]
fn split4(raw: &[u8], planes: &mut [u8], turn: impl Fn(u32) -> u32) {
    let numbers = raw.as_chunks::<4>().0;
    let (low, high) = planes.split_at_mut(2 * numbers.len());
    let (p0, p1) = low.split_at_mut(numbers.len());
    let (p2, p3) = high.split_at_mut(numbers.len());
    let planes = p0.iter_mut().zip(p1).zip(p2).zip(p3);
    for (bytes, (((p0, p1), p2), p3)) in numbers.iter().zip(planes) {
        let n = turn(u32::from_le_bytes(*bytes));
        (*p0, *p1, *p2, *p3) = (n as u8, (n >> 8) as u8, (n >> 16) as u8, (n >> 24) as u8);
    }
}

#[inline(always)]
fn merge4(planes: &[&[u8]; PLANES_MAX], raw: &mut [u8], turn: impl Fn(u32) -> u32) {
    let numbers = raw.as_chunks_mut::<4>().0;
    let planes = planes[0].iter().zip(planes[1]).zip(planes[2]).zip(planes[3]);
    for (bytes, (((&p0, &p1), &p2), &p3)) in numbers.iter_mut().zip(planes) {
        let (p0, p1, p2, p3) = (u32::from(p0), u32::from(p1), u32::from(p2), u32::from(p3));
        *bytes = turn(p0 | p1 << 8 | p2 << 16 | p3 << 24).to_le_bytes();
    }
}

#[inline(always)]
fn split8(raw: &[u8], planes: &mut [u8], turn: impl Fn(u64) -> u64) {
    let numbers = raw.as_chunks::<8>().0;
    for (p, plane) in planes.chunks_exact_mut(numbers.len().max(1)).enumerate() {
        for (bytes, byte) in numbers.iter().zip(plane) {
            *byte = (turn(u64::from_le_bytes(*bytes)) >> (8 * p)) as u8;
        }
    }
}

#[inline(always)]
fn merge8(planes: &[&[u8]; PLANES_MAX], raw: &mut [u8], turn: impl Fn(u64) -> u64) {
    let numbers = raw.as_chunks_mut::<8>().0;
    let [p0, p1, p2, p3, p4, p5, p6, p7] = planes;
    let low = p0.iter().zip(*p1).zip(*p2).zip(*p3);
    let high = p4.iter().zip(*p5).zip(*p6).zip(*p7);
    for ((bytes, (((p0, p1), p2), p3)), (((p4, p5), p6), p7)) in
        numbers.iter_mut().zip(low).zip(high)
    {
        let n = u64::from_le_bytes([*p0, *p1, *p2, *p3, *p4, *p5, *p6, *p7]);
        *bytes = turn(n).to_le_bytes();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_planes_of_known_numbers_are_where_the_page_says() {
        // 1.0 and -2.0 as fp32 are 3f800000 and c0000000; rotated left 7f000000 and 80000001.
        let raw = [0x00, 0x00, 0x80, 0x3f, 0x00, 0x00, 0x00, 0xc0];
        let mut planes = [0; 8];
        split(Form { width: 4, rotated: true }, &raw, &mut planes);
        assert_eq!(planes, [0x00, 0x01, 0x00, 0x00, 0x00, 0x00, 0x7f, 0x80]);
        // -1.5 as bf16 is bfc0; rotated left 7f81.
        split(Form { width: 2, rotated: true }, &[0xc0, 0xbf], &mut planes[..2]);
        assert_eq!(planes[..2], [0x81, 0x7f]);
        split(Form { width: 2, rotated: false }, &[0xc0, 0xbf, 1, 2], &mut planes[..4]);
        assert_eq!(planes[..4], [0xc0, 1, 0xbf, 2]);
    }

    #[test]
    fn both_ways_of_compiling_agree_and_merging_undoes_splitting() {
        let raw: Vec<u8> = (0..8 * 137_u32).map(|i| (i * i * 7 + i / 3) as u8).collect();
        for width in [1, 2, 4, 8] {
            for rotated in [false, width > 1] {
                let form = Form { width, rotated };
                let (mut planes, mut plain) = (vec![0; raw.len()], vec![0; raw.len()]);
                split(form, &raw, &mut planes);
                split_all(form, &raw, &mut plain);
                assert_eq!(planes, plain, "{form:?}");
                let mut parts: [&[u8]; PLANES_MAX] = [&[]; PLANES_MAX];
                for (part, plane) in parts.iter_mut().zip(planes.chunks(raw.len() / width)) {
                    *part = plane;
                }
                let mut back = vec![0; raw.len()];
                merge(form, &parts, &mut back);
                assert_eq!(back, raw, "{form:?}");
                back.fill(0);
                merge_all(form, &parts, &mut back);
                assert_eq!(back, raw, "{form:?}");
            }
        }
    }
}
