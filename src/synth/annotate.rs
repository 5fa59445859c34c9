//! Annotations: which things a labeller would box at a keyframe, and their rows.

use std::collections::BTreeMap;

use super::camera::NOTHING;
use super::cast::{Column, Surface};
use super::clock::{Clock, Kind};
use super::lidar::Sweep;
use super::math::{Vec2, yaw_quaternion};
use super::rig::{LIDAR_AT_M, mount};
use super::rows;
use super::snapshot::{Placed, Snapshot};
use super::tables::{Table, Tables};
use super::world::{Class, Motion, State, World};
use crate::error::Result;

/// Things further from the ego are not boxed.
const BOXED_M: f64 = 70.0;
/// Below this speed a vehicle counts as stopped, m/s.
const STOPPED_MPS: f64 = 0.2;

/// A thing at a keyframe.
#[derive(Debug, Clone)]
pub struct Seen {
    /// Index into the world's things.
    pub thing: usize,
    /// Where it is.
    pub state: State,
    /// Sweep points on it.
    pub points: usize,
    /// Visibility level 1..4.
    pub visibility: u8,
}

/// Things to be boxed in a keyframe.
pub fn look(snapshot: &Snapshot<'_>, sweep: &Sweep) -> Vec<Seen> {
    let mut counts: BTreeMap<u32, usize> = BTreeMap::new();
    for &thing in sweep.things.iter().filter(|&&thing| thing != NOTHING) {
        *counts.entry(thing).or_default() += 1;
    }
    let near =
        |placed: &&Placed<'_>| placed.state.position.minus(snapshot.ego.position).norm() < BOXED_M;
    let seen = |placed: &Placed<'_>| Seen {
        thing: placed.index,
        state: placed.state,
        points: counts.get(&(placed.index as u32)).copied().unwrap_or(0),
        visibility: visibility(snapshot, placed),
    };
    snapshot.things.iter().filter(near).map(seen).collect()
}

/// Level by the share of a grid of points on the thing's middle plane that a ray from the roof
/// reaches without meeting something else.
fn visibility(snapshot: &Snapshot<'_>, placed: &Placed<'_>) -> u8 {
    let origin = mount(&snapshot.ego, LIDAR_AT_M);
    let mut column = Column::new(origin, LIDAR_AT_M[2]);
    let [length, _, height] = placed.thing.size_m;
    let mut reached = 0;
    for i in -2..=2 {
        let along = Vec2::new(f64::from(i) * 0.2 * length, 0.0).rotate(placed.state.axis);
        let to = placed.state.position.plus(along, 1.0).minus(origin);
        let distance = to.norm().max(1e-3);
        column.aim(snapshot, Vec2::new(to.x / distance, to.y / distance));
        for j in 1..=4 {
            let z = f64::from(j) * 0.2 * height;
            let hit = column.hit((z - LIDAR_AT_M[2]) / distance);
            let own = matches!(hit.surface, Surface::Thing { placed: slot, .. }
                if snapshot.things[usize::from(slot)].index == placed.index);
            reached += u32::from(own || hit.distance_m > distance);
        }
    }
    match reached {
        0..8 => 1,
        8..12 => 2,
        12..16 => 3,
        _ => 4,
    }
}

/// Writes the annotations and instances of a scene; `seen` by keyframe.
pub fn push(
    tables: &mut Tables,
    clock: &Clock,
    world: &World,
    seen: &BTreeMap<u32, Vec<Seen>>,
) -> Result<()> {
    let mut chains: BTreeMap<usize, Vec<(u32, &Seen)>> = BTreeMap::new();
    for (&keyframe, things) in seen {
        for thing in things {
            chains.entry(thing.thing).or_default().push((keyframe, thing));
        }
    }
    for (&thing, chain) in &chains {
        push_chain(tables, clock, world, thing, chain)?;
    }
    Ok(())
}

fn push_chain(
    tables: &mut Tables,
    clock: &Clock,
    world: &World,
    thing: usize,
    chain: &[(u32, &Seen)],
) -> Result<()> {
    let name = |at: Option<&(u32, &Seen)>| {
        at.map_or_else(String::new, |(keyframe, _)| annotation(clock, *keyframe, thing))
    };
    let instance_token = clock.token(Kind::Instance, thing as u64, 0);
    for (i, (keyframe, seen)) in chain.iter().enumerate() {
        let [length, width, height] = world.things[thing].size_m;
        let row = rows::Annotation {
            token: annotation(clock, *keyframe, thing),
            sample_token: clock.token(Kind::Sample, (*keyframe).into(), 0),
            instance_token: instance_token.clone(),
            visibility_token: seen.visibility.to_string(),
            attribute_tokens: attribute(tables, world, seen),
            translation: [seen.state.position.x, seen.state.position.y, 0.5 * height],
            size: [width, length, height],
            rotation: yaw_quaternion(seen.state.yaw),
            prev: name(i.checked_sub(1).and_then(|before| chain.get(before))),
            next: name(chain.get(i + 1)),
            num_lidar_pts: seen.points,
            num_radar_pts: 0,
        };
        tables.push(Table::SampleAnnotation, &row)?;
    }
    let row = rows::Instance {
        token: instance_token,
        category_token: tables.category(world.things[thing].class),
        nbr_annotations: chain.len(),
        first_annotation_token: name(chain.first()),
        last_annotation_token: name(chain.last()),
    };
    tables.push(Table::Instance, &row)
}

fn annotation(clock: &Clock, keyframe: u32, thing: usize) -> String {
    clock.token(Kind::Annotation, keyframe.into(), thing as u64)
}

fn attribute(tables: &Tables, world: &World, seen: &Seen) -> Vec<String> {
    let thing = &world.things[seen.thing];
    let moving = seen.state.velocity.norm() > STOPPED_MPS;
    let name = match (thing.class, thing.motion, moving) {
        (Class::Cone, ..) => return Vec::new(),
        (Class::Pedestrian, _, true) => "pedestrian.moving",
        (Class::Pedestrian, _, false) => "pedestrian.standing",
        (_, Motion::Still, _) => "vehicle.parked",
        (_, _, true) => "vehicle.moving",
        (_, _, false) => "vehicle.stopped",
    };
    tables.attribute(name).into_iter().collect()
}
