package rack

import (
	"bytes"
	"compress/flate"
	"encoding/base64"
	"io"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// A starting token is the id of the last entry that was handed out and, behind a dot, the rack's
// token of the page on which the listing goes on. CSI allows 128 bytes, and the rack's token has
// about 200, so it is deflated. What does not fit all the same is left out: the listing then begins
// at the rack's first page, and skips what was handed out.

// packToken is the token of what comes behind an id; page is empty for the rack's first page.
func packToken(project, after, page string) string {
	raw, err := base64.URLEncoding.DecodeString(page)
	if err != nil || page == "" || base64.URLEncoding.EncodeToString(raw) != page {
		return after
	}
	var packed bytes.Buffer
	w, err := flate.NewWriterDict(&packed, flate.BestCompression, tokenWords(project))
	if err != nil {
		panic(err) // the level is a good one
	}
	_, _ = w.Write(raw) // a buffer takes everything
	_ = w.Close()
	token := after + "." + base64.RawURLEncoding.EncodeToString(packed.Bytes())
	if len(token) > volume.MaxStringBytes {
		return after
	}
	return token
}

// unpackToken reads what packToken wrote, and nothing else.
func unpackToken(project, token string) (after, page string, ok bool) {
	after, packed, paged := strings.Cut(token, ".")
	switch {
	case !volume.IsID(after) || len(token) > volume.MaxStringBytes:
		return "", "", false
	case !paged:
		return after, "", true
	}
	data, err := base64.RawURLEncoding.DecodeString(packed)
	if err != nil {
		return "", "", false
	}
	const most = 512 // of the rack's own token
	raw, err := io.ReadAll(io.LimitReader(
		flate.NewReaderDict(bytes.NewReader(data), tokenWords(project)), most))
	if err != nil {
		return "", "", false
	}
	page = base64.URLEncoding.EncodeToString(raw)
	return after, page, packToken(project, after, page) == token
}

// tokenWords are what the rack's token is likely to hold. Nothing depends on it but the length of
// ours; another rack's words are only packed less well.
func tokenWords(project string) []byte {
	return []byte(`{"v":"v1","page_start":{"sort_by":"id_ascending","project":"` + project +
		`","last_seen":""}}`)
}
