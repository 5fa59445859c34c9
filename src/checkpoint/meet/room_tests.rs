//! Ranks as threads in one memory meeting place.

use std::thread;

use super::*;
use crate::checkpoint::meet::MemoryMeet;

fn rooms(meet: &Arc<MemoryMeet>, world_size: u32, timeout_ms: u64) -> Vec<Room> {
    let timeout = Duration::from_millis(timeout_ms);
    let meet = || Arc::clone(meet) as Arc<dyn Meet>;
    (0..world_size).map(|r| Room::new(meet(), "root".into(), r, world_size, timeout)).collect()
}

fn all<T: Send>(rooms: &[Room], work: impl Fn(&Room) -> T + Sync) -> Vec<T> {
    thread::scope(|s| {
        let handles: Vec<_> = rooms.iter().map(|room| s.spawn(|| work(room))).collect();
        handles.into_iter().map(|h| h.join().unwrap()).collect()
    })
}

#[test]
fn all_ranks_come_to_one_session_in_spite_of_what_a_dead_run_left() {
    let meet = Arc::new(MemoryMeet::default());
    for (key, value) in [("hello-1", "00000000000000aa"), ("welcome-1", "00bb"), ("joined-2", "x")]
    {
        meet.set(&format!("root/{key}"), value.as_bytes()).unwrap();
    }
    let ids = all(&rooms(&meet, 4, 5000), |r| r.join(r.deadline(), &mut no_tick).unwrap());
    assert!(ids.iter().all(|id| *id == ids[0]));
    let again = all(&rooms(&meet, 4, 5000), |r| r.join(r.deadline(), &mut no_tick).unwrap());
    assert_ne!(again[0], ids[0]);
}

#[test]
fn a_missing_rank_is_named_by_rank_0_and_rank_0_by_the_others() {
    let meet = Arc::new(MemoryMeet::default());
    let mut all_rooms = rooms(&meet, 3, 60);
    all_rooms.pop();
    let results =
        all(&all_rooms, |r| r.join(r.deadline(), &mut no_tick).map_err(|e| e.to_string()));
    assert!(results[0].as_ref().unwrap_err().contains("rank 2"), "{results:?}");
    assert!(results[1].is_ok(), "rank 0 did answer rank 1");
    let alone = rooms(&meet, 3, 30).pop().unwrap();
    let text = alone.join(alone.deadline(), &mut no_tick).unwrap_err().to_string();
    assert!(text.contains("rank 0"), "{text}");
}

#[test]
fn values_of_any_size_cross_and_are_removed() {
    let meet = Arc::new(MemoryMeet::default());
    let rooms = rooms(&meet, 2, 5000);
    all(&rooms, |r| r.join(r.deadline(), &mut no_tick).unwrap());
    let big: Vec<u8> = (0..PART_BYTES_MAX * 2 + 5).map(|i| (i % 253) as u8).collect();
    for value in [&big[..], b"", b"\0x"] {
        rooms[1].put("op", "v", value).unwrap();
        let got = rooms[0].wait("op", "v", rooms[0].deadline(), &mut no_tick).unwrap();
        assert!(got.unwrap() == value);
        rooms[0].remove("op", "v").unwrap();
        assert_eq!(rooms[0].wait("op", "v", Instant::now(), &mut no_tick).unwrap(), None);
    }
    assert!(meet.keys().is_empty(), "{:?}", meet.keys());
}

#[test]
fn gathering_returns_who_came_and_a_tick_can_stop_a_wait() {
    let meet = Arc::new(MemoryMeet::default());
    let rooms = rooms(&meet, 3, 5000);
    all(&rooms, |r| r.join(r.deadline(), &mut no_tick).unwrap());
    rooms[1].put("op", "part-1", b"one").unwrap();
    let soon = Instant::now() + Duration::from_millis(10);
    let got = rooms[0].gather("op", "part", &[1, 2], soon, &mut no_tick).unwrap();
    assert_eq!(got.into_iter().collect::<Vec<_>>(), vec![(1, b"one".to_vec())]);
    let mut stop = || Err(Error::Closed { what: "test".into() });
    assert!(rooms[0].wait("op", "never", rooms[0].deadline(), &mut stop).is_err());
}
