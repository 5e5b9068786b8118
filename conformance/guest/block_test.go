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
	for _, c := range []struct {
		name  string
		block []byte
		says  string
	}{
		{"itself", made(p, 3), ""},
		{"zeros", make([]byte, BlockBytes), "zero"},
		{"the previous generation", made(p.At(1), 3), "generation 1 instead of 2"},
		{"the next block", made(p, 4), "block 4 of the same volume"},
		{"a block of another volume", made(Pattern{Seed: 8, Generation: 2}, 3),
			"its seed is 8, this one's 7"},
		{"a torn block", torn, "torn block that begins as block 3 of generation 2"},
		{"text", []byte(strings.Repeat("ab", BlockBytes/2)), "begins with 61 62"},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := p.compare(c.block, 3)
			if c.says == "" {
				if f != nil {
					t.Errorf("compare = %+v, want nothing", f)
				}
				return
			}
			if f == nil || f.Lost != (c.name == "zeros") || !strings.Contains(f.What, c.says) {
				t.Fatalf("compare = %+v, want %q", f, c.says)
			}
		})
	}
}

func TestAReportNamesTheFirstWrongBlock(t *testing.T) {
	var r Report
	if err := r.Err(); err != nil {
		t.Errorf("Err = %v for a report without findings", err)
	}
	r.Read = 5
	r.add(Finding{Block: 3, Offset: 12288, Lost: true, What: "zero"})
	r.add(Finding{Block: 4, Offset: 16384, What: "garbage"})
	want := "2 of 5 blocks are not what was written: the first is block 3 at byte 12288, which is zero"
	if err := r.Err(); err == nil || err.Error() != want {
		t.Errorf("Err = %v, want %q", err, want)
	}
}
