"""Records of single operators: each names operators that exist, once."""

import pytest

from opforge.cases.variants import VARIANTS
from opforge.judge.facts import _LISTED, OPERATOR_FACTS, OperatorFacts, facts_of
from opforge.ops import CustomOperator, table
from opforge.sandbox.guest.situations import SITUATIONS


def test_every_packet_exists_and_has_one_record():
    assert sorted(set(OPERATOR_FACTS) - {op.packet for op in table()}) == []
    assert len(OPERATOR_FACTS) == sum(map(len, _LISTED))


@pytest.mark.parametrize("packet", [p for p, facts in OPERATOR_FACTS.items() if facts.crashes_on])
def test_crashes_name_variants_and_overloads_that_exist(packet):
    facts = OPERATOR_FACTS[packet]
    overloads = [table().get(name) for name in table().packet(packet)]
    arguments = {f"argument:{a.name}" for op in overloads for a in op.arguments}
    assert set(facts.crashes_on) <= {*VARIANTS, *SITUATIONS, *arguments}
    assert facts.crashes_only_in in {"", *table().packet(packet)}


def test_arguments_that_may_stay_unread_are_arguments():
    for packet, facts in OPERATOR_FACTS.items():
        names = {a.name for name in table().packet(packet) for a in table().get(name).arguments}
        assert set(facts.conditionally_read) <= names, packet


def test_all_forms_of_an_operator_share_a_record():
    variants = ("tril.default", "tril_.default", "tril.out")
    assert {id(facts_of(table().get(name))) for name in variants} == {id(OPERATOR_FACTS["tril"])}


def test_other_operators_have_no_facts():
    assert facts_of(table().get("cos.default")) == OperatorFacts()
    assert facts_of(CustomOperator.create("topk")) == OperatorFacts()
