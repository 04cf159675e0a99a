"""The index says what `fedquilt.transport.link.filter_matches` says, whatever is held."""

from hypothesis import given, settings
from hypothesis import strategies as st

from fedquilt.transport.link import TopicTree, filter_matches

FEW = settings(max_examples=50, deadline=None)
LEVEL = st.sampled_from(["a", "b", ""])
TOPIC = st.lists(LEVEL, min_size=1, max_size=4).map("/".join)
PATTERN = st.tuples(st.lists(LEVEL | st.just("+"), min_size=1, max_size=4), st.booleans()).map(
    lambda drawn: "/".join([*drawn[0], *(["#"] if drawn[1] else [])])
)


@FEW
@given(st.lists(PATTERN | st.just("#"), unique=True), TOPIC)
def test_filters_that_take_a_topic_are_found(patterns, topic):
    tree = TopicTree()
    for pattern in patterns:
        tree.add(pattern, pattern)
    assert sorted(tree.items_matching_topic(topic)) == sorted(
        pattern for pattern in patterns if filter_matches(pattern, topic)
    )


@FEW
@given(st.lists(TOPIC, unique=True), PATTERN | st.just("#"))
def test_topics_that_a_filter_takes_are_found(topics, pattern):
    tree = TopicTree()
    for topic in topics:
        tree.add(topic, topic)
    assert sorted(tree.items_matching_filter(pattern)) == sorted(
        topic for topic in topics if filter_matches(pattern, topic)
    )


@FEW
@given(st.lists(PATTERN, unique=True, min_size=1), st.data())
def test_what_is_removed_is_found_no_more_and_the_rest_still_is(patterns, data):
    tree = TopicTree()
    for pattern in patterns:
        tree.add(pattern, pattern)
    gone = data.draw(st.sets(st.sampled_from(patterns)))
    for pattern in [*gone, "never/added"]:
        tree.remove(pattern, pattern)
    topic = data.draw(TOPIC)
    assert set(tree.items_matching_topic(topic)) == {p for p in patterns if p not in gone and filter_matches(p, topic)}


def test_an_empty_tree_keeps_no_levels():
    tree = TopicTree()
    tree.add("a/b/c", 1)
    tree.add("a/b", 2)
    tree.remove("a/b/c", 1)
    assert tree.items_matching_filter("#") == [2]
    tree.remove("a/b", 2)
    assert not tree._root.children
