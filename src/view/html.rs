//! The page around the drawings.

use std::fmt::Write;

use super::above;
use super::camera::Plane;
use super::legend;
use super::scene::{Encoded, Picture, Scene};

const STYLE: &str = "body{background:#15171a;color:#ddd;font:14px system-ui,sans-serif;margin:16px}\
h1{font-size:18px;font-weight:600;margin:20px 0 4px;overflow-wrap:anywhere}h1:first-of-type\
{margin-top:0}p{margin:0 0 12px;color:#9aa}.cameras{display:grid;grid-template-columns:\
repeat(3,1fr);gap:8px}@media(max-width:800px){.cameras{grid-template-columns:1fr}}figure{margin:0}\
figcaption{color:#9aa;padding:2px 0 6px}svg{width:100%;display:block;background:#0c0d0f}\
.key{display:flex;flex-wrap:wrap;gap:4px 20px}.key i{display:inline-block;width:12px;height:12px;\
margin-right:6px;vertical-align:-1px}.key .scale{width:120px;margin:0 6px}.key .line{width:20px;\
height:2px;background:#fff;vertical-align:4px}\
.above{max-width:900px}.ring{fill:none;stroke:#333;stroke-width:.15}.above text{fill:#9aa;\
font-size:2px}.points path{fill:none;stroke-width:.25;stroke-linecap:round}\
.box{fill:none;stroke-width:.25}.speed{stroke:#fff;stroke-width:.15}\
.self{fill:none;stroke:#fff;stroke-width:.4}.gone{padding:40px 12px;background:#0c0d0f;color:#e88;\
overflow-wrap:anywhere}pre{background:#0c0d0f;padding:8px;overflow:auto;max-height:300px}";

/// Order in which a driver would look at nuScenes' cameras; others follow by name.
const CAMERA_ORDER: [&str; 6] = [
    "CAM_FRONT_LEFT",
    "CAM_FRONT",
    "CAM_FRONT_RIGHT",
    "CAM_BACK_LEFT",
    "CAM_BACK",
    "CAM_BACK_RIGHT",
];

/// The whole page.
pub(super) fn page(scene: &Scene) -> String {
    let mut pictures: Vec<_> = scene.pictures.iter().collect();
    let place = |name: &str| CAMERA_ORDER.iter().position(|c| *c == name).unwrap_or(usize::MAX);
    pictures.sort_by_key(|p| (place(&p.name), p.name.clone()));
    let mut html = String::from("<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">");
    html.push_str("<meta name=\"viewport\" content=\"width=device-width\">");
    let key = escape(&scene.key);
    // Writing to a String cannot fail.
    let _ = write!(html, "<title>{key}</title><style>{STYLE}</style><h1>{key}</h1>");
    let _ = write!(html, "<p>{}</p>", escape(&summary(scene)));
    if !pictures.is_empty() {
        html.push_str(&legend::of_pictures(scene));
    }
    html.push_str("<div class=\"cameras\">");
    for shown in pictures {
        html.push_str(&picture(shown, scene));
    }
    html.push_str("</div>");
    if scene.lidar.is_some() || scene.boxes.is_some() {
        let frame = scene.lidar.as_ref().map_or("boxes", |lidar| lidar.name.as_str());
        let _ = write!(
            html,
            "<h1>From above</h1><p>{} frame</p>{}{}",
            escape(frame),
            legend::of_above(scene),
            above::svg(scene)
        );
    }
    for (name, text) in &scene.texts {
        let _ = write!(html, "<h1>{}</h1><pre>{}</pre>", escape(name), escape(text));
    }
    html.push_str("</html>\n");
    html
}

fn summary(scene: &Scene) -> String {
    let mut parts = vec![scene.name.clone(), format!("{} ns", scene.timestamp_ns)];
    if let Some(lidar) = &scene.lidar {
        parts.push(format!("{} points of {}", lidar.points_m.len(), lidar.name));
    }
    if let Some(boxes) = &scene.boxes {
        parts.push(format!("{} boxes", boxes.names.len()));
    }
    parts.retain(|part| !part.is_empty());
    parts.join(" · ")
}

fn picture(shown: &Picture, scene: &Scene) -> String {
    let name = escape(&shown.name);
    match &shown.image {
        Ok(image) => {
            let (drawing, caption) = overlay(shown, image, scene);
            let (w, h) = (image.width, image.height);
            let data = base64(&image.bytes);
            let kind = image.media_type;
            format!(
                "<figure><svg viewBox=\"0 0 {w} {h}\"><image width=\"{w}\" height=\"{h}\" \
                 href=\"data:{kind};base64,{data}\"/>{drawing}</svg>\
                 <figcaption>{name}{caption}</figcaption></figure>"
            )
        }
        Err(e) => {
            let text = escape(&e.to_string());
            format!(
                "<figure><div class=\"gone\">{text}</div><figcaption>{name}</figcaption></figure>"
            )
        }
    }
}

/// Points and boxes for one picture, and what the caption says about them.
fn overlay(shown: &Picture, image: &Encoded, scene: &Scene) -> (String, String) {
    let Some((camera, lidar)) = shown.camera.as_ref().zip(scene.lidar.as_ref()) else {
        return (String::new(), String::new());
    };
    let plane = Plane { camera, width: f64::from(image.width), height: f64::from(image.height) };
    match plane.lidar_to_camera(lidar) {
        None => (String::new(), String::new()),
        Some(Err(e)) => (String::new(), format!(" · {}", escape(&e.to_string()))),
        Some(Ok(transform)) => {
            let (mut svg, count) = plane.points(&transform, &lidar.points_m);
            if let Some(boxes) = scene.boxes.as_ref().filter(|b| b.frame == lidar.name) {
                svg.push_str(&plane.boxes(&transform, boxes));
            }
            let ms = (camera.timestamp_ns - scene.timestamp_ns) as f64 * 1e-6;
            (svg, format!(" · {count} points · {ms:+.1} ms"))
        }
    }
}

pub(super) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            c => out.push(c),
        }
    }
    out
}

/// RFC 4648 base64 with padding.
pub(super) fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let byte = |i: usize| u32::from(group.get(i).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for i in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * i) & 63) as usize];
            out.push(if i <= group.len() { char::from(digit) } else { '=' });
        }
    }
    out
}
