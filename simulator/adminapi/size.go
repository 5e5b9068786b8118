package adminapi

import (
	"fmt"
	"math"
	"regexp"
	"strconv"
	"strings"
)

// Size is a number of bytes, which is read by ParseSize and written as a number.
type Size int64

var sizes = regexp.MustCompile(`^([0-9]+) ?(MiB|GiB|TiB)?$`)

// ParseSize reads 1073741824, 1GiB or 1 GiB: in flags, in the seed file, in faults and switches.
func ParseSize(text string) (Size, error) {
	parts := sizes.FindStringSubmatch(text)
	if parts == nil {
		return 0, fmt.Errorf("%q is no size; write bytes, or a number of MiB, GiB or TiB", text)
	}
	unit := map[string]int64{"": 1, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}[parts[2]]
	number, err := strconv.ParseInt(parts[1], 10, 64)
	if err != nil || number > math.MaxInt64/unit {
		return 0, fmt.Errorf("%s is too large", text)
	}
	return Size(number * unit), nil
}

// UnmarshalJSON reads a number or a string.
func (s *Size) UnmarshalJSON(data []byte) (err error) {
	if string(data) == "null" {
		return nil
	}
	*s, err = ParseSize(strings.Trim(string(data), `"`))
	return err
}
