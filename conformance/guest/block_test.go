package guest

import (
	"strings"
	"testing"
)

func TestAFindingDescribesTheContentOfAWrongBlock(t *testing.T) {
	p := Pattern{Seed: 7, Generation: 2, Count: 10}
	made := func(p Pattern, n int64) []byte {
		block := make([]byte, BlockBytes)
		p.fill(block, n)
		return block
	}
	torn := made(p, 3)
	copy(torn[BlockBytes/2:], make([]byte, BlockBytes/2))
	for _, blank := range [][]byte{made(p.At(0), 3), torn} {
		if f := p.At(0).compare(blank, 3); (f == nil) != allZero(blank) {
			t.Errorf("in the place of a block that was never written, compare = %+v", f)
		}
	}
	if f := p.compare(made(p, 3), 3); f != nil {
		t.Errorf("compare with the block itself = %+v", f)
	}
	for says, block := range map[string][]byte{
		"zero":                        make([]byte, BlockBytes),
		"generation 1 instead of 2":   made(p.At(1), 3),
		"block 4 of the same volume":  made(p, 4),
		"its seed is 8, this one's 7": made(Pattern{Seed: 8, Generation: 2}, 3),
		"torn block that begins as block 3 of generation 2": torn,
		"begins with 61 62": []byte(strings.Repeat("ab", BlockBytes/2)),
	} {
		f := p.compare(block, 3)
		if f == nil || f.Lost != (says == "zero") || !strings.Contains(f.What, says) {
			t.Errorf("compare = %+v, want %q", f, says)
		}
	}
}

func TestAReportNamesTheFirstWrongBlock(t *testing.T) {
	r := Report{Read: 5}
	if err := r.Err(); err != nil {
		t.Errorf("Err = %v for a report without findings", err)
	}
	r.add(Finding{Block: 3, Offset: 12288, Lost: true, What: "zero"})
	r.add(Finding{Block: 4, Offset: 16384, What: "garbage"})
	want := "2 of 5 blocks are not what was written: the first is block 3 at byte 12288, which is zero"
	if err := r.Err(); err == nil || err.Error() != want {
		t.Errorf("Err = %v, want %q", err, want)
	}
}
