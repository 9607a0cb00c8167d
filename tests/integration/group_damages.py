"""Damage to plant in groups, with their targets and parked events, and in meshes: see `damages`."""

from __future__ import annotations

from tests.integration.stream_damages import first_row

PLANTED_IN_GROUPS: dict[str, tuple[str, list[str]]] = {
    "a target of no group": (
        "lease_without_group",
        ["UPDATE leases SET group_id = 4711 WHERE target = 'orders/idle'"],
    ),
    "a parked event of no group": (
        "lease_without_group",
        ["UPDATE parked SET group_id = 4711"],
    ),
    "a target that is past the end of the log": (
        "lease_position_wrong",
        [
            "UPDATE leases SET at_position = (SELECT next_position FROM counters)"
            " WHERE target = 'orders/idle'"
        ],
    ),
    "work beyond what was correlated": (
        "lease_position_wrong",
        ["UPDATE leases SET work_to = 1000000 WHERE target = 'orders/held'"],
    ),
    "a claim that would begin behind the work": (
        "lease_position_wrong",
        ["UPDATE leases SET waits_from = work_to + 1 WHERE target = 'orders/held'"],
    ),
    "a failure that is long past": (
        "lease_position_wrong",
        ["UPDATE leases SET failed = at_position WHERE target = 'orders/blocked'"],
    ),
    "a worker without the end of its lease": (
        "lease_wrong",
        ["UPDATE leases SET lease_until_ms = 0 WHERE target = 'orders/held'"],
    ),
    "the end of a lease without a worker": (
        "lease_wrong",
        ["UPDATE leases SET lease_until_ms = 1 WHERE target = 'orders/idle'"],
    ),
    "a lease whose number begins again": (
        "lease_wrong",
        ["UPDATE leases SET token = 0 WHERE target = 'orders/held'"],
    ),
    "fewer retries than none": (
        "lease_wrong",
        ["UPDATE leases SET retry = -1 WHERE target = 'orders/held'"],
    ),
    "a blocked target with a worker": (
        "blocked_wrong",
        ["UPDATE leases SET worker = 'ann', lease_until_ms = 1 WHERE target = 'orders/blocked'"],
    ),
    "a blocked target without a reason": (
        "blocked_wrong",
        ["UPDATE leases SET error = NULL WHERE target = 'orders/blocked'"],
    ),
    "a target that no claim would find": (
        "lease_state_wrong",
        ["UPDATE leases SET state = 0 WHERE target = 'orders/held'"],
    ),
    "a target that claims would find too late": (
        "lease_state_wrong",
        ["UPDATE leases SET due_ms = due_ms + 1 WHERE target = 'orders/held'"],
    ),
    "a lane that the group does not know": (
        "lane_unknown",
        ["UPDATE groups SET lanes = '[]' WHERE name = 'billing'"],
    ),
    "a replay of nothing": (
        "replaying_wrong",
        ["UPDATE leases SET replaying = 1 WHERE target = 'orders/idle'"],
    ),
    "a replay that the target does not wait for": (
        "replaying_wrong",
        ["UPDATE parked SET replaying = FALSE WHERE replaying"],
    ),
    "a parked event without its target": (
        "parked_without_target",
        ["UPDATE parked SET target = 'orders/other' WHERE target = 'orders/parked'"],
    ),
    "a replayed message without its target": (
        "parked_without_target",
        ["DELETE FROM leases WHERE target = (SELECT target FROM parked WHERE replaying)"],
    ),
    "a parked event past the end of the log": (
        "parked_wrong",
        ["UPDATE parked SET position = 1000000 WHERE target = 'orders/parked'"],
    ),
    "a parked event of another stream": (
        "parked_wrong",
        ["UPDATE parked SET source = 'orders/other' WHERE target = 'orders/parked'"],
    ),
    "fewer attempts than none": (
        "parked_wrong",
        ["UPDATE parked SET attempts = -1 WHERE target = 'orders/parked'"],
    ),
    "what a target was told of, behind its work": (
        "told_wrong",
        ["UPDATE told SET position = 1000000 WHERE position = (SELECT max(position) FROM told)"],
    ),
    "two events that cover the same positions": (
        "told_wrong",
        ["UPDATE told SET covers_from = 0 WHERE position = (SELECT max(position) FROM told)"],
    ),
    "events of a target that is not there": (
        "told_without_target",
        ["UPDATE told SET target = 'no one'"],
    ),
    "what a target of no group was told of": (
        "lease_without_group",
        ["UPDATE told SET group_id = 4711"],
    ),
    "a wrong number of what targets were told of": (
        "group_count_wrong",
        ["UPDATE told_counts SET told = told + 1"],
    ),
    "a wrong number of targets": (
        "group_count_wrong",
        ["UPDATE groups SET targets_count = targets_count + 1 WHERE name = 'billing'"],
    ),
    "a wrong number of parked events": (
        "group_count_wrong",
        ["UPDATE groups SET parked_count = 0 WHERE name = 'billing'"],
    ),
    "a lane that comes twice": (
        "group_count_wrong",
        ["UPDATE groups SET lanes = '[\"default\",\"default\"]' WHERE name = 'billing'"],
    ),
    "numbers of leases that begin too low": (
        "group_count_wrong",
        ["UPDATE groups SET token_floor = -1 WHERE name = 'billing'"],
    ),
    "targets that are known before there are events": (
        "watermark_wrong",
        ["UPDATE groups SET watermark = 1000000 WHERE name = 'billing'"],
    ),
    "a group that begins behind its watermark": (
        "watermark_wrong",
        ["UPDATE groups SET start_position = watermark + 1 WHERE name = 'billing'"],
    ),
    "a group that cannot be read": (
        "group_unreadable",
        ["UPDATE groups SET settings = '{' WHERE name = 'billing'"],
    ),
    "two groups of one name": (
        "group_taken_twice",
        [
            "DROP INDEX groups_by_name",
            "UPDATE groups SET name = 'billing' WHERE name = 'queue'",
        ],
    ),
    "a group whose number would be given out again": (
        "counter_behind",
        [
            "UPDATE groups SET id = 1000000 WHERE name = 'billing'",
        ],
    ),
    "a group from the future": (
        "group_time_wrong",
        ["UPDATE groups SET created_ms = created_ms + 10000000000 WHERE name = 'billing'"],
    ),
    "a target that was changed in the future": (
        "group_time_wrong",
        ["UPDATE leases SET updated_ms = 10000000000000 WHERE target = 'orders/held'"],
    ),
    "an event that was parked in the future": (
        "group_time_wrong",
        ["UPDATE parked SET parked_ms = 10000000000000 WHERE target = 'orders/parked'"],
    ),
    "a message that is not what was written": (
        "checksum_wrong",
        [f"UPDATE log SET checksum = checksum + 1 WHERE position = {first_row('json')}"],
    ),
    "a principal that is said to hold what it does not": (
        "usage_wrong",
        ["INSERT INTO principal_usage VALUES ('ann', 'streams', 3)"],
    ),
    "a mesh that cannot be read": (
        "mesh_unreadable",
        [
            "UPDATE meshes SET settings = '{' WHERE name = 'shop'",
        ],
    ),
    "a mesh in no state": (
        "mesh_wrong",
        [
            "UPDATE meshes SET state = 9 WHERE name = 'club'",
        ],
    ),
    "a mesh with an impossible name": (
        "mesh_wrong",
        [
            "UPDATE meshes SET name = 'a b' WHERE name = 'club'",
        ],
    ),
    "a mesh from the future": (
        "mesh_time_wrong",
        [
            "UPDATE meshes SET created_ms = created_ms + 10000000000 WHERE name = 'shop'",
        ],
    ),
    "a member that joined in the future": (
        "mesh_time_wrong",
        [
            "UPDATE topic_members SET created_ms = created_ms + 10000000000 WHERE member = 'ann'",
        ],
    ),
    "a send from the future": (
        "mesh_time_wrong",
        [
            "UPDATE sends SET first_seen_ms = first_seen_ms + 10000000000 WHERE client_id = 'm-1'",
        ],
    ),
    "two meshes of one name": (
        "mesh_taken_twice",
        [
            "DROP INDEX meshes_by_name",
            "UPDATE meshes SET name = 'shop' WHERE name = 'club'",
        ],
    ),
    "a mesh whose number would be given out again": (
        "counter_behind",
        [
            "UPDATE meshes SET id = 1000000 WHERE name = 'ending'",
        ],
    ),
    "a stream of a mesh that is not there": (
        "mesh_stream_wrong",
        [
            "UPDATE streams SET path = '__mesh/nowhere/topic/alerts' WHERE path ="
            " '__mesh/shop/topic/alerts'",
        ],
    ),
    "a stream of a mesh in no folder": (
        "mesh_stream_wrong",
        [
            "UPDATE streams SET path = '__mesh/shop/fax/alerts' WHERE path ="
            " '__mesh/shop/topic/alerts'",
        ],
    ),
    "a group of a queue that is not there": (
        "mesh_group_wrong",
        [
            "UPDATE groups SET name = 'mesh:shop:queue:other' WHERE name = 'mesh:shop:queue:jobs'",
        ],
    ),
    "an inbox without its group": (
        "mesh_group_wrong",
        [
            "UPDATE groups SET state = 1 WHERE name = 'mesh:shop:inbox:ann'",
        ],
    ),
    "a send of no mesh": (
        "row_without_mesh",
        [
            "UPDATE sends SET mesh = 4711 WHERE client_id = 'm-1' AND expires_ms IS NULL",
        ],
    ),
    "a member of a topic of no mesh": (
        "row_without_mesh",
        [
            "UPDATE topic_members SET mesh = 4711 WHERE member = 'ann' AND mesh = (SELECT"
            " id FROM meshes WHERE name = 'shop')",
        ],
    ),
    "a member of a topic who has no inbox": (
        "topic_member_wrong",
        [
            "UPDATE topic_members SET member = 'cid' WHERE member = 'bea'",
        ],
    ),
    "a member of a topic that is not there": (
        "topic_member_wrong",
        [
            "UPDATE topic_members SET topic = 'news' WHERE member = 'bea'",
        ],
    ),
    "a fingerprint cut short": (
        "send_wrong",
        [
            "UPDATE sends SET fingerprint = x'00' WHERE client_id = 'm-1'",
        ],
    ),
    "a send of an unknown kind": (
        "send_wrong",
        [
            "UPDATE sends SET kind = 'fax' WHERE client_id = 'm-1'",
        ],
    ),
    "a send that would never be swept": (
        "send_expiry_wrong",
        [
            "UPDATE sends SET expires_ms = NULL WHERE client_id = 'to-ann'",
        ],
    ),
    "a send that would be swept too early": (
        "send_expiry_wrong",
        [
            "UPDATE sends SET expires_ms = first_seen_ms + 1 WHERE client_id = 'm-2'",
        ],
    ),
    "a send behind the end of its stream": (
        "send_place_wrong",
        [
            "UPDATE sends SET messages = 1000 WHERE client_id = 'm-1'",
        ],
    ),
    "a send in a stream that it did not go to": (
        "send_place_wrong",
        [
            "UPDATE sends SET ref = 'bea' WHERE client_id = 'to-ann'",
        ],
    ),
    "a send in a stream that was never made": (
        "send_place_wrong",
        [
            "UPDATE sends SET stream = 1000000 WHERE client_id = 'm-1'",
        ],
    ),
}
