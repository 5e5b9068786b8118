// Package rack is the driver's client of an Oxide rack: the SDK's client with the driver's token,
// reads that validate their responses, listings that always end, and the conversion of the rack's
// errors to the driver's.
//
// Files: client.go (construction), token.go and transport.go (the token, and the path of every
// request), disk.go, snapshot.go, instance.go and validate.go (reads and their validation),
// paging.go and page_token.go (listings, divided into CSI's pages), errors.go (Oxide error to
// csierr).
//
// It never changes anything on a rack by itself: the caller does so, through the SDK's methods that
// Client embeds.
package rack
