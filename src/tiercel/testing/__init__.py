"""For authors of tiers: the suite that every kind of place has to pass, and sealed records to test with.

    from tiercel.testing.conformance import TierContract

    class TestMine(TierContract):
        @pytest.fixture
        def tier(self) -> Tier:
            return MyTier(...)

`python -m tiercel.testing KIND --url URL` runs the same on an installed kind. Both need pytest and
hypothesis (`pip install 'tiercel[testing]'`). Nothing of Tiercel's own imports this package.
"""
