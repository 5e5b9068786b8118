package volume

import "testing"

func TestMessagesShowSizesAndObjectsTwice(t *testing.T) {
	for _, test := range []struct{ got, want string }{
		{SizeText(10 * GiB), "10 GiB (10737418240 bytes)"},
		{SizeText(GiB + GiB/2), "1.50 GiB (1610612736 bytes)"},
		{SizeText(512), "512 bytes"},
		{NameAndID("db", someID), "db (" + someID + ")"},
		{NameAndID("", someID), someID},
		{NameAndID("db", ""), "db"},
	} {
		if test.got != test.want {
			t.Errorf("got %q, want %q", test.got, test.want)
		}
	}
}
